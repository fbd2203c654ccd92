"""Estimates what a converted network will cost in memory and arithmetic, before it is built."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from ibnn import check
from ibnn.convert import plan
from ibnn.inputs import Inputs, as_tensors, batch_length, call_arguments, logits_of
from ibnn.kernels import KERNELS
from ibnn.kernels.convolution import convolve, rows_pay
from ibnn.layers.registry import duplicate

_COPIES = 3  # tensors of the posterior's size that σ and the KL "components" keep for their backward pass


class Cost(NamedTuple):
    """Cost of a converted network on one batch.

    Products are the multiply–adds of matrix products and convolutions.
    """

    weights: int  #: Parameters of the network.
    latents: int  #: Parameters that conversion adds: mean and standard deviation of every node and component.
    plain_bytes: int  #: What a training step of the plain network keeps for its backward pass, beside the weights.
    step_bytes: int  #: The same for the converted network.
    step_products: int  #: Products of a training step, forward and backward.
    predict_bytes: int  #: The outputs of all draws.
    predict_products: int  #: Products of `predict`.
    passes: int  #: Forward passes of `predict`, K · S.

    def __str__(self) -> str:
        step = self.step_bytes / max(self.plain_bytes, 1)
        return (
            f"{self.latents:,} latent parameters beside {self.weights:,} weights\n"
            f"training step: {self.step_products / 1e9:,.3g} G multiply–adds, {self.step_bytes / 1e6:,.1f} MB kept for "
            f"backward ({step:.2f} × plain)\n"
            f"predict: {self.passes} passes, {self.predict_products / 1e9:,.3g} G multiply–adds, "
            f"{self.predict_bytes / 1e6:,.1f} MB of outputs"
        )


def cost(net: nn.Module, x: Inputs, components: int = 8, samples: int = 5) -> Cost:
    """Estimates what `convert(net, components=components)` costs on a batch: one training step and one `predict`.

    Runs one forward pass of a copy of the plain network; the rest is arithmetic.

    Args:
        net: The plain network.
        x: A batch of inputs, as long as the batches to come.
        components: K.
        samples: Draws per component of `predict`; the training step has one copy of every example.

    >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> found = cost(net, torch.zeros(32, 8), components=4)
    >>> found.weights, found.latents, found.step_products == 3 * 32 * (8 * 16 + 16 * 2)
    (178, 192, True)
    """
    check.integer("components", components, remedy="Pass components=8.")
    check.integer("samples", samples, remedy="Pass samples=5.")
    planned = plan(net)
    net, x = duplicate(net).train(), as_tensors(x)
    args, kwargs = call_arguments(x)
    layers = [net.get_submodule(entry.name) for entry in planned.layers]
    own = [*net.parameters(), *net.buffers()]
    flops = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.mkldnn_rnn_layer: _lstm_operations})
    spared: list[int] = []
    for layer in layers:
        if KERNELS.get(type(layer)) is convolve:
            layer.register_forward_hook(partial(_count_spared, spared))
    with torch.enable_grad(), torch.random.fork_rng(), saved_bytes(own) as saved, flops:
        output = logits_of(net(*args, **kwargs))
    rows, draws, size = batch_length(x), components * samples, next(net.parameters()).element_size()
    products = flops.get_total_flops() // 2  # a multiply–add is two operations
    drawn = rows * (2 * planned.nodes * size + 8)  # z, the noise behind it, and whose it is
    return Cost(
        weights=planned.weights,
        latents=2 * components * planned.nodes,
        plain_bytes=saved.bytes,
        step_bytes=saved.bytes + drawn + _COPIES * components * planned.nodes * size,
        step_products=3 * products - sum(spared),
        predict_bytes=draws * output.nbytes,
        predict_products=draws * products,
        passes=draws,
    )


def _count_spared(spared: list[int], layer: Any, args: tuple[Any, ...], output: Tensor) -> None:
    """Appends the products that a convolution of an input without a gradient spares in its backward pass."""
    if args and not args[0].requires_grad and rows_pay(layer.weight, output.shape[2:], layer.dilation, layer.groups):
        spared.append(output.numel() * layer.weight[0].numel())


def _lstm_operations(x: torch.Size, weight_ih: torch.Size, weight_hh: torch.Size, *args: Any, **kwargs: Any) -> int:
    """Counts the operations of one layer of the LSTM kernel for CPUs, which torch does not count."""
    return 2 * prod(x[:-1]) * (prod(weight_ih) + prod(weight_hh))


@contextmanager
def saved_bytes(known: Iterable[Tensor] = ()) -> Iterator[SimpleNamespace]:
    """Counts the bytes of distinct storages, but those of known tensors, that a block keeps for its backward pass."""
    own = {tensor.untyped_storage()._cdata for tensor in known}
    kept: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is used twice
    saved = SimpleNamespace(bytes=0)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in kept:
            kept[storage._cdata] = storage
            saved.bytes += storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
