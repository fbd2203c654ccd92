"""PROFILE: a scale of the noise for each layer, by gradient descent through the draws."""

import math

import torch
from torch import Tensor

from ibnn.calibration.few import FewDraws
from ibnn.calibration.outputs import Outputs
from ibnn.calibration.plan import BATCH, COPIES, GRADIENT
from ibnn.likelihood import LIKELIHOODS

STEPS, REACH = 100, 8.0  # most steps of Adam, and how far they may go altogether, in log σ
MOST = 0.3  # of a step
COST = GRADIENT * BATCH * COPIES  # of a step, in rows through the network
_OTHER = 2**20  # number of the first draw, apart from those of the curve


@torch.enable_grad()
def layer_scales(outputs: Outputs, y: Tensor, scale: float, temperature: float, *, temper: bool, steps: int) -> Tensor:
    """Returns deviations of layers' latents and units (2, L) that lower the NLL of the first rows, of targets y (R, …).

    Args:
        outputs: The model and its held-out inputs.
        y: Targets of as many of the first rows.
        scale: Where the descent starts, for all layers.
        temperature: Temperature it starts at.
        temper: Whether the temperature descends, too.
        steps: How many steps it takes.
    """
    if type(outputs.model.likelihood) not in LIKELIHOODS.values():
        raise NotImplementedError("its likelihood is not one of the library's own")
    likelihood = FewDraws(outputs.model.likelihood, outputs.model.components * outputs.samples)
    log_std = (outputs.flat * math.log(scale)).requires_grad_()
    log_t = torch.tensor(math.log(temperature), device=outputs.device, requires_grad=temper)
    learnt = [log_std, log_t] if temper else [log_std]
    rate = min(REACH / steps, MOST)
    optimiser = torch.optim.Adam(learnt, rate)
    generator = torch.Generator().manual_seed(outputs.seed)
    order: list[Tensor] = []
    late = torch.zeros_like(log_std)  # sum over the last quarter
    for step in range(steps):
        order = order or list(torch.randperm(len(y), generator=generator).split(BATCH))
        rows = order.pop()
        first, std, x = _OTHER + step * COPIES // 2, log_std.exp(), outputs.inputs(rows)
        numbers = range(first, first + COPIES // 2)
        drawn = torch.cat(
            [outputs.model.outputs(x, outputs.latents(own, [j], rows)) for j in numbers for own in (std, -std)]
        )
        losses, counts = likelihood.losses(drawn[None], y[rows.to(outputs.device)], log_t.exp())
        gradients = torch.autograd.grad(losses.sum() / counts.sum(), learnt)
        if not all(gradient.isfinite().all() for gradient in gradients):
            raise ValueError("the gradient is not finite")
        for parameter, gradient in zip(learnt, gradients, strict=True):
            parameter.grad = gradient
        optimiser.param_groups[0]["lr"] = rate * min(1.0, 2 * (1 - step / steps))
        optimiser.step()
        late += log_std.detach() if step >= steps * 3 // 4 else 0
        outputs.count(GRADIENT * COPIES * len(rows))
    return (late / (steps - steps * 3 // 4)).exp()
