"""LINE: the linear part of a regression, found in closed form, and a network on top of it."""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.linear_model import RidgeCV
from torch import Tensor, nn

from ibnn.autograd import inverse_softplus

ALPHAS = tuple(10.0**power for power in range(-2, 5))  # penalties that leave-one-out errors choose from
LEAST = 0.01  # of the scale of what the line leaves, in standard deviations of the target


class Fitted(NamedTuple):
    """A line and what it leaves."""

    weight: Tensor  # coefficients (targets, inputs)
    bias: Tensor  # its value at 0, (targets,)
    rest: Tensor  # standard deviation of the residuals, (targets,)


class Line(nn.Module):
    """A fixed linear function of the inputs, and the scale of what a network adds to it.

    Attributes:
        weight: Coefficients (targets, inputs).
        bias: Its value at 0, (outputs,). Outputs for the noise of targets, if the network predicts it, come after those
            for means; there it is the parameter of noise of the size of the rest.
        gain: What the network's outputs are multiplied by, (outputs,): the size of the rest for means, 1 for noise.
    """

    weight: Tensor
    bias: Tensor
    gain: Tensor

    def __init__(self, fitted: Fitted, *, predicted: bool) -> None:
        """Takes a line, and whether the network predicts the noise of its targets."""
        super().__init__()
        weight, bias, rest = fitted
        self.register_buffer("weight", weight)
        self.register_buffer("bias", torch.cat([bias, inverse_softplus(rest.square())]) if predicted else bias)
        self.register_buffer("gain", torch.cat([rest, torch.ones_like(rest)]) if predicted else rest)

    @property
    def targets(self) -> int:
        """Number of targets."""
        return len(self.weight)

    def base(self, x: Tensor) -> Tensor:
        """Returns the line's own outputs, (B, outputs)."""
        return F.pad(F.linear(x, self.weight), (0, len(self.bias) - self.targets)) + self.bias


class OnLine(nn.Module):
    """A network on top of a line: the line's output plus its gain times the network's."""

    def __init__(self, line: Line, body: nn.Module) -> None:
        super().__init__()
        self.line, self.body = line, body

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs, (B, outputs)."""
        output: Tensor = self.line.base(x) + self.line.gain * self.body(x)
        return output


def fit_line(x: Any, y: Any, weight: Any, rest: Tensor | None = None) -> Fitted:
    """Fits targets (n, targets) by ridge regression, whose penalty minimises the leave-one-out error.

    Args:
        x: Standardised inputs (n, inputs).
        y: Standardised targets.
        weight: Weights of the rows.
        rest: Size of the residuals (targets,); default that of these rows.

    >>> x = np.linspace(-1, 1, 9)[:, None]
    >>> weight, bias, rest = fit_line(x, 3 * x + 1, np.ones(9))
    >>> bool(abs(weight - 3) < 0.05 and abs(bias - 1) < 0.05 and rest < 0.02)
    True
    """
    ridge = RidgeCV(ALPHAS).fit(x, y, sample_weight=weight)
    if rest is None:
        squares = np.average((y - ridge.predict(x).reshape(y.shape)) ** 2, axis=0, weights=weight)
        rest = torch.tensor(np.sqrt(squares).clip(LEAST))
    coefficients, bias = np.atleast_2d(ridge.coef_), np.atleast_1d(ridge.intercept_)
    return Fitted(torch.tensor(coefficients), torch.tensor(bias), rest)
