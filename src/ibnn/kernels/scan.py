"""One direction of one recurrent layer whose input and state are multiplied by a z for each row.

No fused kernel of torch takes a z for each row. This one works in place on a few buffers and has a backward pass of its
own: the factors of a step's gradients are computed for many steps at once, which leaves a step with one product of
matrices and a handful of small operations. tanh(x) is computed as 2σ(2x) − 1: twice as fast on CPUs, and as exact in
absolute terms. The weights of what goes through tanh are doubled beforehand, which is exact.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ibnn.kernels.autograd import differentiable

State = tuple[Tensor, ...]  # h, and c of an LSTM, (B, H) each
Weights = Sequence[Any]  # those of inputs and of states, and their biases, (G · H, …) each; biases may be None

_AT_ONCE = 2**20  # entries of factors that are computed at once


class Plan(NamedTuple):
    """What is run: the kind of cell, from which end, and the same by operations that autograd knows."""

    kind: str  # "lstm" or "gru"
    reverse: bool
    slow: Callable[..., tuple[Tensor, ...]]  # takes what `scan` takes, for derivatives of derivatives


def scan(plan: Plan, x: Tensor, z_in: Tensor, z: Tensor, weights: Weights, state: State) -> tuple[Tensor, State]:
    """Returns outputs (T, B, H) and the last state from x (T, B, D), z_in (B, D), z (B, H) and the first state."""
    output, *last = _Scan.apply(plan, x, z_in, z, *weights, *state)  # type: ignore[no-untyped-call]
    return output, tuple(last)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, x: Tensor, z_in: Tensor, z: Tensor, *more: Any) -> tuple[Tensor, ...]:
        output, last, kept = CELLS[plan.kind].run(plan, _product(x, z_in), z, more[:4], more[4:])
        ctx.plan, ctx.count = plan, 3 + len(more)
        ctx.save_for_backward(x, z_in, z, *more, output, *kept)  # not the product: x is kept anyway
        ctx.set_materialize_grads(False)
        return output, *(part.clone() for part in last)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        plan, needed = ctx.plan, ctx.needs_input_grad[1:]
        saved = ctx.saved_tensors  # read once: checkpointing allows no more
        inputs, kept = saved[: ctx.count], saved[ctx.count :]
        if torch.is_grad_enabled():  # create_graph=True
            return None, *differentiable(plan.slow, inputs, gradients, needed)
        (x, z_in, z, w, u, _, _, *state), (to_output, *to_last) = inputs, gradients
        inner, outer, to_z, *to_state = _back(plan, z, u, state, kept, to_output, to_last)
        before = torch.stack(_before(plan, kept[0], state[0])).mul_(z)
        to_u, to_b_h = torch.mm(inner.t(), before.flatten(0, 1)), inner.sum(0) if needed[6] else None
        turn = z.shape[-1] if plan.kind == "gru" else 0  # its outer gates are n, r, u
        to_w, to_b = torch.mm(outer.t(), _product(x, z_in).flatten(0, 1)), outer.sum(0) if needed[5] else None
        to_product = torch.mm(outer, w.roll(turn, 0)).view(x.shape) if needed[0] or needed[1] else None
        to_z_in = None if to_product is None else (to_product * x).sum(0)
        to_x = to_product.mul_(z_in) if needed[0] and to_product is not None else None
        to_b = None if to_b is None else to_b.roll(-turn, 0)
        return None, to_x, to_z_in, to_z, to_w.roll(-turn, 0), to_u, to_b, to_b_h, *to_state


def _product(x: Tensor, z: Tensor) -> Tensor:
    """Returns x ∘ z of all steps, (T, B, D), with the steps first in memory."""
    product: Tensor = torch.mul(x, z, out=x.new_empty(x.shape))
    return product


# ------------------------------------------------------------------------------------------------------------ forward
# Each returns the outputs of all steps, the last state, and what else the backward pass needs.


def _lstm(plan: Plan, x: Tensor, z: Tensor, weights: Weights, state: State) -> Any:
    """Gates (T, B, 4H) become σ(i), σ(f), tanh(g), σ(o) in place; keeps them and all c."""
    (h, c), scaled, bent = state, state[0] * z, torch.empty_like(z)
    w, u, b, b_h = (_doubled(part, 4) for part in weights)
    gates = F.linear(x, w, None if b is None else b + b_h)
    made, cells = (gates.new_empty(*gates.shape[:2], z.shape[-1]) for _ in range(2))
    u, minus = u.t().contiguous(), z.new_full((), -1.0)
    for gate, i, f, g, o, c_t, h_t in _steps(plan.reverse, gates, *_blocks(gates), cells, made):
        gate.addmm_(scaled, u).sigmoid_()
        torch.add(minus, g, alpha=2, out=g)
        torch.mul(f, c, out=c_t).addcmul_(i, g)
        torch.add(minus, torch.add(c_t, c_t, out=bent).sigmoid_(), alpha=2, out=bent)
        torch.mul(torch.mul(o, bent, out=h_t), z, out=scaled)
        h, c = h_t, c_t
    return made, (h, c), (gates, cells)


def _gru(plan: Plan, x: Tensor, z: Tensor, weights: Weights, state: State) -> Any:
    """Gates (T, B, 4H) become tanh(n), σ(r), σ(u) and twice the state's part of n, in place; keeps them."""
    (h,), scaled, size = state, state[0] * z, z.shape[-1]
    w, u, b, b_h = (_doubled(part, 3) for part in weights)
    gates, made = (x.new_empty(*x.shape[:2], width * size) for width in (4, 1))
    gates[..., : 3 * size] = F.linear(x, w.roll(size, 0), None if b is None else b.roll(size, 0))
    u, minus, part = u.t().contiguous(), z.new_full((), -1.0), z.new_empty(len(z), 3 * size)
    part_of_both, part_of_new = part[:, : 2 * size], part[:, 2 * size :]
    parts = (gates[..., size : 3 * size], *_blocks(gates), made)
    for both, new, reset, keep, inner, h_t in _steps(plan.reverse, *parts):
        torch.mm(scaled, u, out=part) if b_h is None else torch.addmm(b_h, scaled, u, out=part)
        both.add_(part_of_both).sigmoid_()
        new.addcmul_(reset, inner.copy_(part_of_new)).sigmoid_()
        torch.add(minus, new, alpha=2, out=new)
        torch.lerp(new, h, keep, out=h_t)
        torch.mul(h_t, z, out=scaled)
        h = h_t
    return made, (h,), (gates,)


def _steps(backwards: bool, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Returns the parts of tensors of all steps, step by step."""
    parts = list(zip(*(tensor.unbind() for tensor in tensors), strict=True))
    return parts[::-1] if backwards else parts


def _blocks(gates: Tensor) -> tuple[Tensor, ...]:
    """Returns the four blocks of gates, (T, B, H) each."""
    return torch.unbind(gates.unflatten(-1, (4, -1)), 2)


def _doubled(weight: Tensor | None, blocks: int) -> Any:
    """Returns a weight or bias with the block of rows that goes through tanh, its third, times two."""
    if weight is None:
        return None
    weight = weight.clone(memory_format=torch.contiguous_format)
    weight.unflatten(0, (blocks, -1))[2].mul_(2)
    return weight


# ----------------------------------------------------------------------------------------------------------- backward
# The gradients of a step's gates are those of the state after it times factors. Factors of many steps are computed at
# once, but not of all, to save memory.


def _back(plan: Plan, z: Tensor, u: Tensor, state: State, kept: Any, to_output: Tensor | None, to_last: Any) -> Any:
    """Returns gradients: of the gates' products with states and with inputs, (T · B, …) each, of z and of the state."""
    cell, (steps, rows, size) = CELLS[plan.kind], kept[0].shape
    # The gates are gone when the graph is; their memory then serves their gradients.
    reused = not torch._C._autograd._get_current_graph_task_keep_graph()
    found = (kept[1] if reused else torch.empty_like(kept[1])).unflatten(-1, (4, size))  # (T, B, 4, H)
    inner, outer = found[:, :, cell.inner].flatten(2), found[:, :, cell.outer].flatten(2)  # views
    to_state = [torch.zeros_like(s) if g is None else g.clone() for s, g in zip(state, to_last, strict=True)]
    to_z, product = torch.zeros_like(z), torch.empty_like(z)
    before = [_before(plan, made, first) for made, first in zip(kept[::2], state, strict=True)]
    given = [None] * steps if to_output is None else list(to_output.unbind())
    at_once = max(1, _AT_ONCE // (rows * 4 * size))
    chunks = [slice(start, start + at_once) for start in range(0, steps, at_once)]
    turn = 1 if plan.reverse else -1  # from the step that is run last to the first
    for chunk in chunks[::turn]:
        factors = cell.factors([part[chunk] for part in kept], [part[chunk] for part in before])
        parts = _steps(not plan.reverse, inner[chunk], found[chunk], *factors)
        lists = zip(parts, before[0][chunk][::turn], given[chunk][::turn], strict=True)
        for (inner_t, found_t, *own), before_t, given_t in lists:
            if given_t is not None:
                to_state[0].add_(given_t)
            cell.back(found_t, to_state, *own)
            torch.mm(inner_t, u, out=product)
            to_z.addcmul_(before_t, product)
            to_state[0].addcmul_(product, z) if cell.passes else torch.mul(product, z, out=to_state[0])
    return inner.flatten(0, 1), outer.flatten(0, 1), to_z, *to_state


def _before(plan: Plan, made: Tensor, first: Tensor) -> list[Tensor]:
    """Returns the state before each step, in time."""
    after = list(made.unbind())
    return [*after[1:], first] if plan.reverse else [first, *after[:-1]]


def _factors_lstm(kept: Sequence[Tensor], before: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    y, cells = kept[1].unflatten(-1, (4, -1)), kept[2]
    i, f, g, o = y.unbind(2)
    factors = torch.addcmul(y, y, y, value=-1)  # y (1 − y)
    by_i, by_f, by_g, by_o = factors.unbind(2)
    by_i.mul_(g)
    by_f.mul_(torch.stack(list(before[1])))
    torch.mul(g, g, out=by_g).neg_().add_(1).mul_(i)
    bent = torch.add(cells, cells).sigmoid_().mul_(2).sub_(1)  # tanh(c)
    by_o.mul_(bent)
    through = torch.addcmul(o, o, bent.square_(), value=-1)
    return factors[:, :, :3], by_o, through, f.clone()  # gates are overwritten


def _back_lstm(
    found: Tensor, to_state: Sequence[Tensor], by_ifg: Tensor, by_o: Tensor, through: Tensor, forget: Tensor
) -> None:
    to_h, to_c = to_state
    torch.mul(by_o, to_h, out=found[:, 3])
    to_c.addcmul_(to_h, through)
    torch.mul(by_ifg, to_c[:, None], out=found[:, :3])
    to_c.mul_(forget)


def _factors_gru(kept: Sequence[Tensor], before: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    n, r, u, inner = _blocks(kept[1])
    factors = torch.empty_like(kept[1]).unflatten(-1, (4, -1))
    by_n, by_r, by_u, by_inner = factors.unbind(2)
    torch.mul(n, n, out=by_n).neg_().add_(1).mul_(1 - u)
    torch.mul(by_n, r, out=by_inner)
    torch.addcmul(by_inner, by_inner, r, value=-1, out=by_r).mul_(inner).mul_(0.5)
    torch.addcmul(u, u, u, value=-1, out=by_u).mul_(torch.stack(list(before[0])).sub_(n))
    return factors, u.clone()  # gates are overwritten


def _back_gru(found: Tensor, to_state: Sequence[Tensor], factor: Tensor, keep: Tensor) -> None:
    torch.mul(factor, to_state[0][:, None], out=found)
    to_state[0].mul_(keep)


class Cell(NamedTuple):
    """How steps of a kind are run, and how gradients go back through them."""

    run: Callable[[Plan, Tensor, Tensor, Weights, State], Any]
    factors: Callable[..., tuple[Tensor, ...]]  # of some steps, from what was kept and from the states before them
    back: Callable[..., None]  # one step: writes the gradients of its gates
    inner: slice = slice(None)  # which of the four gradients of a step belong to U (z ∘ h)
    outer: slice = slice(None)  # … to W x
    passes: bool = False  # whether a part of h goes on to the next step as it is


CELLS = {
    "lstm": Cell(_lstm, _factors_lstm, _back_lstm),
    "gru": Cell(_gru, _factors_gru, _back_gru, slice(1, 4), slice(0, 3), passes=True),
}
