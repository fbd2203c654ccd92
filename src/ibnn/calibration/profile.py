"""PROFILE: a scale of the noise for each layer, by gradient descent through the draws."""

import math

import torch
from torch import Tensor

from ibnn.calibration.outputs import Outputs

STEPS, ROWS, COPIES, RATE = 80, 64, 8, 0.1  # Adam on rows × copies at a time
_OTHER = 2**20  # number of the first draw, apart from those of the curve


@torch.enable_grad()
def layer_scales(outputs: Outputs, y: Tensor, scale: float, temperature: float, *, temper: bool) -> Tensor:
    """Returns deviations of layers' latents and units (2, L) that lower the NLL of the first rows, of targets y (R, …).

    Args:
        outputs: The model and its held-out inputs.
        y: Targets of as many of the first rows.
        scale: Where the descent starts, for all layers.
        temperature: Temperature it starts at.
        temper: Whether the temperature descends, too.
    """
    likelihood = outputs.model.likelihood
    if not likelihood.by_row:
        raise NotImplementedError("its likelihood is not one of the library's own")
    log_std = (outputs.flat * math.log(scale)).requires_grad_()
    log_t = torch.tensor(math.log(temperature), device=outputs.device, requires_grad=temper)
    learnt = [log_std, log_t] if temper else [log_std]
    optimiser = torch.optim.Adam(learnt, RATE)
    generator = torch.Generator().manual_seed(outputs.seed)
    order: list[Tensor] = []
    late = torch.zeros_like(log_std)  # sum over the last quarter
    for step in range(STEPS):
        order = order or list(torch.randperm(len(y), generator=generator).split(ROWS))
        rows = order.pop()
        numbers = range(_OTHER + step * COPIES, _OTHER + (step + 1) * COPIES)
        drawn = outputs.model.outputs(outputs.inputs(rows), outputs.latents(log_std.exp(), numbers, rows))
        losses, counts = likelihood.losses(drawn[None], y[rows.to(outputs.device)], log_t.exp())
        gradients = torch.autograd.grad(losses.sum() / counts.sum(), learnt)
        if not all(gradient.isfinite().all() for gradient in gradients):
            raise ValueError("the gradient is not finite")
        for parameter, gradient in zip(learnt, gradients, strict=True):
            parameter.grad = gradient
        optimiser.param_groups[0]["lr"] = RATE * min(1.0, 2 * (1 - step / STEPS))
        optimiser.step()
        late += log_std.detach() if step >= STEPS * 3 // 4 else 0
        outputs.tick()
    return (late / (STEPS - STEPS * 3 // 4)).exp()
