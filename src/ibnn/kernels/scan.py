"""One direction of one recurrent layer whose state is multiplied by a z for each row.

No fused kernel of torch takes a z for each row. This one works in place on a few buffers and has a backward pass of its
own: the factors of a step's gradients are computed for many steps at once, which leaves a step with one product of
matrices and a handful of small operations. tanh(x) is computed as 2σ(2x) − 1: twice as fast on CPUs, and as exact in
absolute terms. The weights of what goes through tanh are doubled beforehand, which is exact.

A tensor of all steps, (N, …), has their rows one after the other: step t has the first `sizes[t]` rows of the batch.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ibnn.kernels.autograd import differentiable

State = tuple[Tensor, ...]  # h, and c of an LSTM, (B, H) each
Weights = Sequence[Any]  # those of inputs and of states, and their biases, (G · H, …) each; biases may be None

_AT_ONCE = 2**20  # entries of factors that are computed at once: fewer make products of small matrices slow


@dataclass(frozen=True)
class Plan:
    """What is run: the kind of cell, the rows of each step, and from which end.

    `slow` computes the same from the same tensors by operations that autograd knows, for derivatives of derivatives.
    """

    kind: str  # "lstm", "gru", "tanh" or "relu"
    sizes: tuple[int, ...]
    reverse: bool
    slow: Callable[..., tuple[Tensor, ...]]


def scan(plan: Plan, x: Tensor, z_in: Tensor | None, z: Tensor, weights: Weights, state: State) -> tuple[Tensor, State]:
    """Returns the outputs of all steps (N, H) and the last state of every row, (B, H) each.

    Args:
        plan: What is run.
        x: Inputs of all steps, (N, D) or (T, B, D).
        z_in: Their z of every row, (B, D), for inputs (T, B, D); None for inputs that were multiplied before.
        z: The state's z of every row, (B, H).
        weights: As torch orders them.
        state: The state before the first step.
    """
    output, *last = _Scan.apply(plan, x, z_in, z, *weights, *state)  # type: ignore[no-untyped-call]
    return output, tuple(last)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, x: Tensor, z_in: Tensor | None, z: Tensor, *more: Any) -> tuple[Tensor, ...]:
        product = x if z_in is None else x * z_in
        output, last, kept = CELLS[plan.kind].run(plan, product, z, more[:4], more[4:])
        ctx.plan, ctx.count = plan, 3 + len(more)
        ctx.save_for_backward(x, z_in, z, *more, output, *kept)  # not the product: x is kept anyway
        ctx.set_materialize_grads(False)
        return output, *last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        plan, needed = ctx.plan, ctx.needs_input_grad[1:]
        saved = ctx.saved_tensors  # read once: checkpointing allows no more
        inputs, kept = saved[: ctx.count], saved[ctx.count :]
        if torch.is_grad_enabled():  # create_graph=True
            return None, *differentiable(plan.slow, inputs, gradients, needed)
        x, z_in, *rest = inputs
        if z_in is None:
            to_x, *others = _Back(plan, (x, *rest), kept, gradients).run((needed[0], *needed[2:]))
            return None, to_x, None, *others
        any_input = needed[0] or needed[1]
        to_product, *others = _Back(plan, (x * z_in, *rest), kept, gradients).run((any_input, *needed[2:]))
        to_z_in = (to_product * x).sum(0) if needed[1] and to_product is not None else None
        to_x = to_product.mul_(z_in) if needed[0] and to_product is not None else None
        return None, to_x, to_z_in, *others


# ------------------------------------------------------------------------------------------------------------ forward
# Each returns the outputs of all steps, the last states, and what else the backward pass needs.


def _lstm(plan: Plan, x: Tensor, z: Tensor, weights: Weights, state: State) -> Any:
    """Gates (N, 4H) become σ(i), σ(f), tanh(g), σ(o) in place; keeps them and all c."""
    (h, c), size = state, z.shape[-1]
    w, u, b, b_h = (_doubled(part, 2, 4) for part in weights)
    gates, made, cells = (z.new_empty(sum(plan.sizes), width * size) for width in (4, 1, 1))
    _products(plan, x, w, None if b is None else b + b_h, gates)
    u, minus, before = u.t().contiguous(), z.new_full((), -1.0), c
    steps = _split(plan, gates, *gates.unflatten(-1, (4, size)).unbind(1), cells, made)
    heads = _heads(plan, z, h * z, torch.empty_like(z))
    for (gate, i, f, g, o, c_t, h_t), (z_t, scaled, bent) in zip(steps, heads, strict=True):
        gate.addmm_(scaled, u).sigmoid_()
        torch.add(minus, g, alpha=2, out=g)
        torch.mul(f, _rows(before, c, len(z_t)), out=c_t).addcmul_(i, g)
        torch.add(minus, torch.add(c_t, c_t, out=bent).sigmoid_(), alpha=2, out=bent)
        torch.mul(torch.mul(o, bent, out=h_t), z_t, out=scaled)
        before = c_t
    return made, (_last(plan, made), _last(plan, cells)), (gates, cells)


def _gru(plan: Plan, x: Tensor, z: Tensor, weights: Weights, state: State) -> Any:
    """Gates (N, 4H) become tanh(n), σ(r), σ(u) and twice the state's part of n, in place; keeps them."""
    (h,), size = state, z.shape[-1]
    w, u, b, b_h = (_doubled(part, 2, 3) for part in weights)
    gates, made = (z.new_empty(sum(plan.sizes), width * size) for width in (4, 1))
    _products(plan, x, w.roll(size, 0), None if b is None else b.roll(size, 0), gates[:, : 3 * size])
    u, minus, before, product = u.t().contiguous(), z.new_full((), -1.0), h, z.new_empty(len(h), 3 * size)
    steps = _split(plan, gates[:, size : 3 * size], *gates.unflatten(-1, (4, size)).unbind(1), made)
    heads = _heads(plan, z, h * z, product, product[:, : 2 * size], product[:, 2 * size :])
    for (both, new, reset, keep, inner, h_t), (z_t, scaled, part, part_of_both, part_of_new) in zip(
        steps, heads, strict=True
    ):
        torch.mm(scaled, u, out=part) if b_h is None else torch.addmm(b_h, scaled, u, out=part)
        both.add_(part_of_both).sigmoid_()
        new.addcmul_(reset, inner.copy_(part_of_new)).sigmoid_()
        torch.add(minus, new, alpha=2, out=new)
        torch.lerp(new, _rows(before, h, len(z_t)), keep, out=h_t)
        torch.mul(h_t, z_t, out=scaled)
        before = h_t
    return made, (_last(plan, made),), (gates,)


def _rnn(plan: Plan, x: Tensor, z: Tensor, weights: Weights, state: State) -> Any:
    """Gates (N, H) become the outputs in place."""
    (h,), bent = state, plan.kind == "tanh"
    w, u, b, b_h = (_doubled(part, 0, 1) for part in weights) if bent else weights
    made, u, minus = z.new_empty(sum(plan.sizes), z.shape[-1]), u.t().contiguous(), z.new_full((), -1.0)
    _products(plan, x, w, None if b is None else b + b_h, made)
    for (h_t,), (z_t, scaled) in zip(_split(plan, made), _heads(plan, z, h * z), strict=True):
        h_t.addmm_(scaled, u)
        torch.add(minus, h_t.sigmoid_(), alpha=2, out=h_t) if bent else h_t.relu_()
        torch.mul(h_t, z_t, out=scaled)
    return made, (_last(plan, made),), ()


def _products(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Writes W x + b of all steps."""
    for chunk in _chunks(plan, x.shape[-1]):
        part, weights, target = _inputs(x, chunk), weight.t(), out[chunk.rows]
        torch.mm(part, weights, out=target) if bias is None else torch.addmm(bias, part, weights, out=target)


def _inputs(x: Tensor, chunk: "_Chunk") -> Tensor:
    """Returns the inputs of some steps, (…, D)."""
    return x[chunk.rows] if x.dim() == 2 else x[chunk.steps].flatten(0, 1)


def _split(plan: Plan, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Returns the parts of tensors of all steps, step by step as they are run."""
    parts = list(zip(*(tensor.split(plan.sizes) for tensor in tensors), strict=True))
    return parts[::-1] if plan.reverse else parts


def _heads(plan: Plan, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Returns the first rows of tensors of the batch, as many as a step has, step by step as they are run."""
    found = {n: tuple(tensor[:n] for tensor in tensors) for n in set(plan.sizes)}
    return [found[n] for n in (reversed(plan.sizes) if plan.reverse else plan.sizes)]


def _doubled(weight: Tensor | None, block: int, blocks: int) -> Any:
    """Returns a weight or bias with one of its blocks of rows times two."""
    if weight is None:
        return None
    weight = weight.clone(memory_format=torch.contiguous_format)
    weight.unflatten(0, (blocks, -1))[block].mul_(2)
    return weight


def _rows(before: Tensor, initial: Tensor, n: int) -> Tensor:
    """Returns n rows of the state before a step: that after the step before, or the initial one where a row begins."""
    had = before.shape[0]
    if had == n:
        return before
    return before[:n] if had > n else torch.cat([before, initial[had:n]])


def _before(plan: Plan, made: Tensor, initial: Tensor) -> list[Tensor]:
    """Returns the state before every step, step by step as they are run."""
    after = [initial, *(part for (part,) in _split(plan, made))]
    return [_rows(part, initial, len(now)) for part, now in itertools.pairwise(after)]


def _last(plan: Plan, made: Tensor) -> Tensor:
    """Returns the state of every row after its last step."""
    parts = made.split(plan.sizes)
    if plan.reverse:
        return torch.clone(parts[0])
    ends = (*plan.sizes[1:], 0)  # rows below that go on
    return torch.cat([part[end:] for part, end in zip(parts, ends, strict=True) if end < len(part)][::-1])


# ----------------------------------------------------------------------------------------------------------- backward
# The gradients of a step's gates are those of the state after it times factors. Factors of many steps are computed at
# once, but not of all, to save memory.


class _Chunk(NamedTuple):
    """Some consecutive steps."""

    plan: Plan  # theirs alone
    steps: slice  # of all steps, in time
    rows: slice  # of the rows of all steps
    run: slice  # of all steps, in the order in which they are run


def _chunks(plan: Plan, width: int) -> Iterator[_Chunk]:
    """Yields a few steps at a time, as many as `_AT_ONCE` allows for a width, those that are run last first."""
    count, at_once = len(plan.sizes), max(1, _AT_ONCE // (width * max(plan.sizes)))
    starts = [0, *itertools.accumulate(plan.sizes)]
    for end in range(count, 0, -at_once):
        run = slice(max(0, end - at_once), end)
        steps = slice(count - run.stop, count - run.start) if plan.reverse else run
        part = replace(plan, sizes=plan.sizes[steps])
        yield _Chunk(part, steps, slice(starts[steps.start], starts[steps.stop]), run)


class _Back:
    """One backward pass."""

    def __init__(self, plan: Plan, inputs: Sequence[Any], kept: Sequence[Tensor], gradients: Sequence[Any]) -> None:
        self.plan, self.cell = plan, CELLS[plan.kind]
        self.x, self.z, self.w, self.u, _, _, *self.state = inputs
        self.kept, self.size, self.to_output = kept, self.z.shape[-1], gradients[0]
        self.to_z, self.product = torch.zeros_like(self.z), torch.empty_like(self.z)
        pairs = zip(self.state, gradients[1:], strict=True)
        self.to_state = [torch.zeros_like(s) if g is None else g.clone() for s, g in pairs]
        self.before = [_before(plan, made, first) for made, first in zip(kept[::2], self.state, strict=True)]
        # The gates are gone when the graph is; their memory then serves their gradients.
        reused = len(kept) > 1 and not torch._C._autograd._get_current_graph_task_keep_graph()
        gates = kept[1] if reused else self.z.new_empty(len(kept[0]), self.cell.blocks * self.size)
        self.gates = gates.unflatten(-1, (-1, self.size))  # (N, blocks, H)
        self.inner = self.gates[:, self.cell.inner].flatten(1)  # a view, as the next
        self.outer = self.gates[:, self.cell.outer].flatten(1)

    def run(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """Returns the gradients of the inputs of `_Scan.forward`."""
        turn = self.size if self.plan.kind == "gru" else 0  # its outer gates are n, r, u
        w, to_w, to_u = self.w.roll(turn, 0), torch.zeros_like(self.w), torch.zeros_like(self.u)
        to_x = self.x.new_empty(len(self.outer), self.x.shape[-1]) if needed[0] else None
        for chunk in _chunks(self.plan, self.cell.blocks * self.size):
            self.cell.back(self, chunk)
            inner, outer = self.inner[chunk.rows], self.outer[chunk.rows]
            to_w.addmm_(outer.t(), _inputs(self.x, chunk))
            to_u.addmm_(inner.t(), self._scaled(chunk))
            if to_x is not None:
                torch.mm(outer, w, out=to_x[chunk.rows])
        to_b = self.outer.sum(0).roll(-turn, 0) if needed[4] else None
        to_b_h = self.inner.sum(0) if needed[5] else None
        to_x = None if to_x is None else to_x.view(self.x.shape)
        return [to_x, self.to_z, to_w.roll(-turn, 0), to_u, to_b, to_b_h, *self.to_state]

    def gathered(self, chunk: _Chunk, part: int = 0) -> Tensor:
        """Returns a copy of a part of the state before some steps, (…, H)."""
        before = self.before[part][chunk.run]
        return torch.cat(before[::-1] if self.plan.reverse else before)

    def _scaled(self, chunk: _Chunk) -> Tensor:
        """Returns z ∘ h before some steps, (…, H)."""
        before, sizes = self.gathered(chunk), chunk.plan.sizes
        if sizes[0] == sizes[-1]:
            return torch.flatten(before.unflatten(0, (len(sizes), -1)).mul_(self.z[: sizes[0]]), 0, 1)
        return before.mul_(torch.cat([self.z[:n] for n in sizes]))

    def steps(self, chunk: _Chunk, *factors: Tensor) -> Iterator[tuple[Any, ...]]:
        """Goes back through some steps; yields the gradients of the state after each, and its part of the factors.

        Goes on when the gradients of the step's gates are written.
        """
        plan = chunk.plan
        heads = _heads(plan, self.product, self.z, self.to_z, *self.to_state)
        made = _split(plan, self.inner[chunk.rows], *factors)
        given = None if self.to_output is None else _split(plan, self.to_output[chunk.rows])
        before = self.before[0][chunk.run]
        for at in reversed(range(len(made))):
            (product, z, to_z, *to_state), (inner, *parts) = heads[at], made[at]
            if given is not None:
                to_state[0].add_(given[at][0])
            yield *to_state, *parts
            torch.mm(inner, self.u, out=product)
            to_z.addcmul_(before[at], product)
            if self.cell.passes:
                to_state[0].addcmul_(product, z)
            else:
                torch.mul(product, z, out=to_state[0])


def _back_lstm(back: _Back, chunk: _Chunk) -> None:
    y, cells = back.kept[1][chunk.rows].unflatten(-1, (4, -1)), back.kept[2][chunk.rows]
    i, f, g, o = y.unbind(1)
    factors = torch.addcmul(y, y, y, value=-1)  # y (1 − y)
    by_i, by_f, by_g, by_o = factors.unbind(1)
    by_i.mul_(g)
    by_f.mul_(back.gathered(chunk, 1))
    torch.mul(g, g, out=by_g).neg_().add_(1).mul_(i)
    bent = torch.add(cells, cells).sigmoid_().mul_(2).sub_(1)  # tanh(c)
    by_o.mul_(bent)
    through, forget = torch.addcmul(o, o, bent.square_(), value=-1), f.clone()  # gates are overwritten below
    found = back.gates[chunk.rows]
    parts = (factors[:, :3], by_o, through, forget, found[:, :3], found[:, 3])
    for to_h, to_c, by_ifg, by_o, through, forget, to_ifg, to_o in back.steps(chunk, *parts):
        torch.mul(by_o, to_h, out=to_o)
        to_c.addcmul_(to_h, through)
        torch.mul(by_ifg, to_c[:, None], out=to_ifg)
        to_c.mul_(forget)


def _back_gru(back: _Back, chunk: _Chunk) -> None:
    n, r, u, inner = back.kept[1][chunk.rows].unflatten(-1, (4, -1)).unbind(1)
    factors = n.new_empty(len(n), 4, back.size)
    by_n, by_r, by_u, by_inner = factors.unbind(1)
    torch.mul(n, n, out=by_n).neg_().add_(1).mul_(1 - u)
    torch.mul(by_n, r, out=by_inner)
    torch.addcmul(by_inner, by_inner, r, value=-1, out=by_r).mul_(inner).mul_(0.5)
    torch.addcmul(u, u, u, value=-1, out=by_u).mul_(back.gathered(chunk).sub_(n))
    keep = u.clone()  # gates are overwritten below
    for to_h, factor, keep_t, found in back.steps(chunk, factors, keep, back.gates[chunk.rows]):
        torch.mul(factor, to_h[:, None], out=found)
        to_h.mul_(keep_t)


def _back_rnn(back: _Back, chunk: _Chunk) -> None:
    made = back.kept[0][chunk.rows]
    factors = (made > 0).to(made.dtype) if back.plan.kind == "relu" else torch.mul(made, made).neg_().add_(1)
    for to_h, factor, found in back.steps(chunk, factors, back.gates[chunk.rows, 0]):
        torch.mul(factor, to_h, out=found)


class Cell(NamedTuple):
    """How steps of a kind are run, and how gradients go back through them."""

    run: Callable[[Plan, Tensor, Tensor, Weights, State], Any]
    back: Callable[[_Back, _Chunk], None]
    blocks: int = 1  # gradients of a step, of which some belong to …
    inner: slice = slice(None)  # … U (z ∘ h)
    outer: slice = slice(None)  # … W x
    passes: bool = False  # whether a part of h goes on to the next step as it is


CELLS = {
    "lstm": Cell(_lstm, _back_lstm, 4),
    "gru": Cell(_gru, _back_gru, 4, slice(1, 4), slice(0, 3), passes=True),
    "tanh": Cell(_rnn, _back_rnn),
    "relu": Cell(_rnn, _back_rnn),
}
