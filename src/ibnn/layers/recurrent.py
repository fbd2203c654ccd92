"""Latents of recurrent layers and cells, on the inputs of each of their weight matrices.

A row has the same z at all time steps. Where every row has its own z, the product with the state's weights is computed
step by step, the product with the input's weights for all steps at once: in `scan`, or, where that cannot run, by
operations that autograd, `torch.func` and compilers know (also of nn.RNN, packed sequences and under autocast).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ibnn.layers.registry import REGISTRY, LayerType, batch_axis

if TYPE_CHECKING:
    from ibnn.latent import Latent

State = tuple[Tensor, ...]  # h, and c of an LSTM, (B, …) each
Ports = dict[str, Tensor]  # z by port
Sizes = tuple[int, ...] | None  # how many packed sequences have a first, second, … step; None if they are not packed
Map = Callable[[Tensor], Tensor]
Scale = Callable[[Tensor, Tensor], Tensor]  # x, z ↦ z ∘ x
Step = Callable[[Tensor, State, Map], State]  # from W x + b, the state, and h ↦ W (z ∘ h) + b

_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def _lstm(x: Tensor, state: State, product: Map) -> State:
    h, c = state
    i, f, g, o = (x + product(h)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(x: Tensor, state: State, product: Map) -> State:
    (h,) = state
    (r, u, n), (r_h, u_h, n_h) = x.chunk(3, -1), product(h).chunk(3, -1)
    u = (u + u_h).sigmoid()
    return ((1 - u) * (n + (r + r_h).sigmoid() * n_h).tanh() + u * h,)


def _rnn(x: Tensor, state: State, product: Map, activation: str) -> State:
    return (getattr(torch, activation)(x + product(state[0])),)


def _step(layer: nn.Module) -> Step:
    if isinstance(layer, nn.LSTM | nn.LSTMCell):
        return _lstm
    if isinstance(layer, nn.GRU | nn.GRUCell):
        return _gru
    assert isinstance(layer, nn.RNN | nn.RNNCell)
    return partial(_rnn, activation=layer.nonlinearity)


# ------------------------------------------------------------------------------------------------------------- layers


def _run(layer: nn.RNNBase, latent: "Latent", z: Ports, input: Any, hx: Any = None) -> Any:
    """Computes the layer's forward, layer by layer, direction by direction, step by step."""
    if not isinstance(input, PackedSequence):
        x = input.transpose(0, 1) if layer.batch_first else input
        z = {port: latent.rows(part, x.shape, 1) for port, part in z.items()}
        latent.current_pass.entries += x.numel() * layer.num_layers
        state = _initial(layer, hx, x, x.shape[1], None)
        output, state = _layers(layer, lambda x, part: latent.multiply(x, part, 1), z, x, state, None)
        return output.transpose(0, 1) if layer.batch_first else output, _as_given(layer, state)
    data, sizes, order, back = input
    lengths = sizes.tolist()  # how many sequences have a first, second, … step
    z = {port: latent.rows(part, (len(lengths), lengths[0], data.shape[-1]), 1) for port, part in z.items()}
    if order is not None:  # from the longest sequence to the shortest
        z = {port: part[order] for port, part in z.items()}
    row = torch.cat([torch.arange(size, device=data.device) for size in lengths])  # whose step an entry of data is
    state = _initial(layer, hx, data, lengths[0], order)
    scaled = lambda x, part: latent.multiply(x, part[row], 0)  # noqa: E731
    output, state = _layers(layer, scaled, z, data, state, tuple(lengths))
    state = state if back is None else tuple(part.index_select(1, back) for part in state)
    return PackedSequence(output, sizes, order, back), _as_given(layer, state)


def _layers(layer: nn.RNNBase, scaled: Scale, z: Ports, x: Tensor, state: State, sizes: Sizes) -> tuple[Tensor, State]:
    """Returns outputs and last states, (L · directions, B, H) each, from inputs, z of every row, and initial states."""
    ends: list[State] = []
    for number in range(layer.num_layers):
        if number and layer.dropout:
            x = F.dropout(x, layer.dropout, layer.training)
        outputs = []
        for reverse in ("", "_reverse")[: 1 + layer.bidirectional]:
            first = tuple(part[len(ends)] for part in state)
            output, end = _direction(layer, f"_l{number}{reverse}", scaled, z, x, first, sizes)
            outputs.append(output)
            ends.append(end)
        x = torch.cat(outputs, -1) if layer.bidirectional else outputs[0]
    return x, tuple(torch.stack(parts) for parts in zip(*ends, strict=True))


def _direction(
    layer: nn.RNNBase, suffix: str, scaled: Scale, ports: Ports, x: Tensor, first: State, sizes: Sizes
) -> tuple[Tensor, State]:
    """Returns the outputs of all steps, in the form of x (T, B, …) or packed (N, …), and the last state."""
    from ibnn.kernels import runs_here, scan

    z_in, z = (ports[name + suffix] for name in _WEIGHTS[:2])
    weights: list[Any] = [getattr(layer, name + suffix, None) for name in _WEIGHTS]
    step, reverse, (w, u, b, b_h) = _step(layer), "reverse" in suffix, weights
    lower = torch.is_autocast_enabled(x.device.type)  # the scan works in one precision, and in place
    if layer.mode in ("LSTM", "GRU") and not sizes and not lower and runs_here(x, z_in, z, *weights, *first):
        plan = scan.Plan(layer.mode.lower(), reverse, partial(_slow, step, reverse))
        return scan.scan(plan, x, z_in, z, weights, first)
    gates, product = F.linear(scaled(x, z_in), w, b), _product(z, u, b_h)
    if torch.compiler.is_exporting() and not sizes:
        return _traced_scan(step, gates, first, product, reverse)
    made, end = _scan(step, gates.split(sizes) if sizes else gates.unbind(), first, product, reverse)
    return torch.cat(made) if sizes else torch.stack(made), end


def _slow(step: Step, reverse: bool, x: Tensor, z_in: Tensor, z: Tensor, *more: Any) -> tuple[Tensor, ...]:
    """Computes what `scan` does from the same tensors."""
    w, u, b, b_h, *state = more
    made, end = _scan(step, F.linear(x * z_in, w, b).unbind(), tuple(state), _product(z, u, b_h), reverse)
    return torch.stack(made), *end


def _scan(step: Step, gates: Sequence[Tensor], state: State, product: Map, reverse: bool) -> tuple[list[Tensor], State]:
    """Returns the outputs of all steps and the last state; rows without a step (packed sequences) keep their state."""
    made: list[Tensor] = []
    for now in reversed(gates) if reverse else gates:
        n = now.shape[0]
        new = step(now, tuple(part[:n] for part in state), product)
        made.append(new[0])
        state = new if n == state[0].shape[0] else tuple(torch.cat([a, b[n:]]) for a, b in zip(new, state, strict=True))
    return made[::-1] if reverse else made, state


def _traced_scan(step: Step, gates: Tensor, state: State, product: Map, reverse: bool) -> tuple[Tensor, State]:
    """Returns what `_scan` does, as one operator in a traced graph, which then takes any number of steps."""
    from torch._higher_order_ops.scan import scan

    def combine(state: State, now: Tensor) -> tuple[State, Tensor]:
        new = step(now, state, product)
        return new, new[0].clone()

    end, made = scan(combine, state, gates, dim=0, reverse=reverse)
    return made, end


def _product(z: Tensor, weight: Tensor, bias: Tensor | None) -> Map:
    """Returns h ↦ W (z ∘ h) + b, for as many first rows as h has."""
    if torch.compiler.is_exporting():
        return lambda h: F.linear(h * z.to(h.dtype), weight, bias)
    return lambda h: F.linear(h * z[: h.shape[0]].to(h.dtype), weight, bias)


def _initial(layer: nn.RNNBase, hx: Any, like: Tensor, rows: int, order: Tensor | None) -> State:
    if hx is None:
        zeros = like.new_zeros(layer.num_layers * (1 + layer.bidirectional), rows, layer.hidden_size)
        return (zeros,) * (1 + isinstance(layer, nn.LSTM))
    state = tuple(hx) if isinstance(layer, nn.LSTM) else (hx,)
    return state if order is None else tuple(part.index_select(1, order) for part in state)


def _as_given(layer: nn.Module, state: State) -> Any:
    return state if isinstance(layer, nn.LSTM | nn.LSTMCell) else state[0]


# -------------------------------------------------------------------------------------------------------------- cells


def _run_cell(layer: nn.RNNCellBase, latent: "Latent", z: Ports, input: Tensor, hx: Any = None) -> Any:
    count = 1 + isinstance(layer, nn.LSTMCell)
    state = (input.new_zeros(len(input), layer.hidden_size),) * count if hx is None else hx
    gates = F.linear(latent.multiply(input, z["weight_ih"], 0), layer.weight_ih, layer.bias_ih)
    product = _product(latent.rows(z["weight_hh"], input.shape, 0), layer.weight_hh, layer.bias_hh)
    return _as_given(layer, _step(layer)(gates, (state,) if isinstance(state, Tensor) else tuple(state), product))


# ----------------------------------------------------------------------------------------------------------- registry


def _matrices(layer: nn.Module) -> tuple[str, ...]:
    names = getattr(layer, "_flat_weights_names", ("weight_ih", "weight_hh"))
    return tuple(name for name in names if name.startswith("weight"))


def _ports(layer: nn.Module) -> dict[str, int]:
    return {name: getattr(layer, name).shape[1] for name in _matrices(layer)}


def _fold(layer: nn.Module, z: Tensor) -> dict[str, Tensor]:
    return {name: getattr(layer, name) * part for name, part in LAYER.split(layer, z).items()}


LAYER = LayerType(ports=_ports, axis=-1, fold=_fold, weights=_matrices, run=_run, batch_axis=batch_axis, fused=True)
for layer_class in (nn.RNN, nn.LSTM, nn.GRU):
    REGISTRY[layer_class] = LAYER
for cell_class in (nn.RNNCell, nn.LSTMCell, nn.GRUCell):
    REGISTRY[cell_class] = replace(LAYER, run=_run_cell)
