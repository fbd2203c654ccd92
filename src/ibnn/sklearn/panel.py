"""PANEL: candidate networks side by side in one module, so that one run of `fit` trains all of them.

A *candidate* is a way to train: how much noise, and where the noise of a regression's target comes from. A *member* is
a network that is trained in one of these ways on all folds but one. All members start from the same weights and see the
same batches and draws, so that their held-out losses can be compared; none affects another.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn.autograd import inverse_softplus
from ibnn.convert import convert
from ibnn.layers.registry import register_layer
from ibnn.likelihood import Likelihood
from ibnn.likelihood.base import Temperature, Terms
from ibnn.network import IBNN
from ibnn.prediction import Prediction
from ibnn.sklearn.line import Line


class Member(NamedTuple):
    """One network of a panel."""

    std: float  # of the noise on its nodes
    fold: int  # rows of this fold are not trained on
    predicted: bool = False  # whether it predicts the target's noise; if not, that is the same for all rows


class StackedLinear(nn.Module):
    """M linear layers of equal shape, one for each member: (B, M, D) to (B, M, outputs).

    A node's z = 1 + sε is drawn once for all members; each scales it to 1 + r(z − 1), with its own ratio r. The
    layer is therefore called with its input twice: the first is multiplied by z.
    """

    ratio: Tensor

    def __init__(self, like: nn.Linear, ratio: Tensor) -> None:
        """Starts every member from the weights of `like`."""
        super().__init__()
        self.weight = nn.Parameter(like.weight.detach().T.repeat(len(ratio), 1, 1))  # (M, D, outputs)
        self.bias = nn.Parameter(like.bias.detach().repeat(len(ratio), 1, 1))  # (M, 1, outputs)
        self.register_buffer("ratio", ratio[:, None].to(like.weight))  # (M, 1)

    @property
    def nodes(self) -> int:
        """Number of inputs."""
        return self.weight.shape[1]

    def forward(self, noisy: Tensor, plain: Tensor) -> Tensor:
        """Returns the outputs for inputs multiplied by z, given with those that were not."""
        x = noisy if noisy is plain else torch.lerp(plain, noisy, self.ratio)
        return torch.baddbmm(self.bias, x.transpose(0, 1), self.weight).transpose(0, 1)

    def folded(self, z: Tensor) -> Tensor:
        """Returns the weights with every member's part of z (D,) multiplied in."""
        return self.weight * torch.lerp(torch.ones_like(z), z, self.ratio)[..., None]


register_layer(StackedLinear, nodes="nodes", fold=StackedLinear.folded)  # type: ignore[arg-type]


class Panel(nn.Module):
    """Members of one architecture: copies of a sequence of linear layers and functions of single entries."""

    def __init__(self, body: nn.Sequential, members: Sequence[Member], lines: Sequence[Line], std: float) -> None:
        """Stacks copies of a network.

        Args:
            body: The network.
            members: What they are.
            lines: What is added to the members' outputs, by fold; empty for nothing.
            std: Standard deviation of the noise that the panel will be given; none of a member's is larger.
        """
        super().__init__()
        ratio = torch.tensor([member.std / std for member in members])
        layers = [StackedLinear(m, ratio) if isinstance(m, nn.Linear) else m for m in body]
        self.body, self.members = nn.ModuleList(layers), len(members)
        self.lines = nn.ModuleList(lines)
        self.line_of = [member.fold for member in members]

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs of all members, (B, M, outputs)."""
        h = x[:, None].expand(-1, self.members, -1)
        for layer in self.body:
            h = layer(h, h) if isinstance(layer, StackedLinear) else layer(h)
        if not self.lines:
            return h
        lines = [cast(Line, line) for line in self.lines]
        bases = torch.stack([line.base(x) for line in lines], 1)  # (B, folds, outputs)
        return bases[:, self.line_of] + lines[0].gain * h


class Copies(nn.Module):
    """Members of any architecture, run one after the other."""

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs of all members, (B, M, outputs)."""
        return torch.stack([net(x) for net in self.nets], 1)


def panel_model(net: Panel | Copies, members: Sequence[Member], jury: "Jury", first: str, seed: int) -> IBNN:
    """Returns a panel with the noise of its members, which training does not change.

    Args:
        net: The panel.
        members: Its members.
        jury: Their likelihood.
        first: Name of the layer of a member that has no noise; empty if all have.
        seed: Decides the draws.
    """
    stacked, std = isinstance(net, Panel), max(member.std for member in members)
    excluded = [f"body.{first}"] if stacked else [f"nets.{number}.{first}" for number in range(len(members))]
    options: Any = {"exclude": excluded} if first else {}
    model = convert(net, components=1, prior_std=std, init_std=0.0, likelihood=jury, copy=False, seed=seed, **options)
    if not stacked:
        own = [(members[int(name.split(".")[1])].std, latent.nodes) for name, latent in model.latents.items()]
        std = torch.cat([torch.full((nodes,), value) for value, nodes in own])  # type: ignore[assignment]
    model.set_posterior(mean=1.0, std=std)
    for latent in model.latents.values():
        latent.requires_grad_(False)
    return model


class Jury(Likelihood):
    """The sum of the members' losses, each over the rows that its fold does not hold out.

    Targets are (B, 2 + targets): fold, weight, and the targets themselves. Members that do not predict the noise of
    their target learn it, each its own.
    """

    folds: Tensor
    predicted: Tensor
    log_std: Tensor | None

    def __init__(self, inner: Likelihood, members: Sequence[Member], noise: Tensor | None = None) -> None:
        """Takes the likelihood of one member, and where log σ of learnt noise starts, (targets,)."""
        super().__init__()
        self.inner, self.discrete = inner, inner.discrete
        self.register_buffer("folds", torch.tensor([float(member.fold) for member in members]))
        self.register_buffer("predicted", torch.tensor([[member.predicted] for member in members]))  # (M, 1)
        learnt = None if noise is None else nn.Parameter(noise.detach().float().repeat(len(members), 1))
        self.register_parameter("log_std", learnt)  # (M, targets)

    @staticmethod
    def join(fold: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """Returns folds (B,), weights (B,) and targets, (B,) or (B, targets), as one tensor."""
        return torch.cat([fold[:, None], weight[:, None], target.reshape(len(target), -1).to(weight)], 1)

    def check(self, output: Tensor, target: Tensor) -> None:
        """Checks nothing: the estimator has."""

    def count(self, target: Tensor) -> int:
        """Returns the number of rows."""
        return len(target)

    def terms(self, output: Tensor, target: Tensor, temperature: Temperature = None) -> Terms:
        """Returns the sum over members of their weighted mean loss."""
        kept = target[:, 1:2] * (target[:, :1] != self.folds)  # (B, M)
        losses = self._losses(output, target[:, 2:])
        loss = ((kept * losses).sum(0) / kept.sum(0).clamp_min(torch.finfo(losses.dtype).tiny)).sum()
        rows = self.total_weight(target)
        return Terms(loss, loss, rows, rows)

    def _losses(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of every row and member, (B, M)."""
        if self.discrete:
            labels = target.long().expand(-1, output.shape[1])
            losses: Tensor = F.cross_entropy(output.transpose(1, 2), labels, reduction="none")
            return losses
        mean, std = self.inner.split(self.completed(output), 1.0)  # type: ignore[operator]
        return (0.5 * ((target[:, None] - mean) / std).square() + std.log()).mean(-1)  # type: ignore[no-any-return]

    def completed(self, output: Tensor) -> Tensor:
        """Returns outputs (…, M, outputs) with the learnt noise where a member predicts none; classes as they are."""
        if self.log_std is None:
            return output
        learnt = inverse_softplus((2 * self.log_std.to(output)).exp())  # (M, targets)
        if output.shape[-1] == learnt.shape[-1]:  # no member predicts it
            return torch.cat([output, learnt.expand_as(output)], -1)
        mean, raw = output.chunk(2, -1)
        return torch.cat([mean, torch.where(self.predicted, raw, learnt)], -1)

    def combine(self, draws: Tensor, temperature: Temperature = None) -> Any:
        """Returns the mean output."""
        return draws.mean(0)

    def summarise(self, draws: Tensor, temperature: Temperature = None) -> Prediction:
        """Returns the prediction of the first member."""
        return self.inner.summarise(self.completed(draws)[..., 0, :], temperature)

    def score(self, prediction: Any, target: Tensor) -> dict[str, float]:
        """Is not asked for: a panel is trained without validation data."""
        raise NotImplementedError
