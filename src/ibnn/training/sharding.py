"""Spreads weights over workers by torch's `fully_shard` (FSDP2); latents are whole on every worker.

A sharded parameter is a DTensor, gathered where a block's forward or backward needs it. Latents are small, and the KL
reads them outside of any forward: they are left whole, and their gradients are averaged here.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm, parameters_to_vector, vector_to_parameters

from ibnn.errors import complaint
from ibnn.latent import Latent

# torch.distributed's sharding takes more than a second to import: only where a model is sharded.


def shard(model: Any, blocks: Sequence[str | type[nn.Module]] = (), **options: Any) -> None:
    """Spreads the weights of a converted network over the workers, in place; `fit` then trains it.

    Call it on every worker (torchrun, accelerate launch) before `fit`. The first worker's values count.

    Args:
        model: Made by `ibnn.convert`, or a method of `ibnn.baselines`.
        blocks: Names or classes of modules in `model.net` whose weights are gathered one block at a time, such as a
            Transformer's layers; what is in none of them is gathered together.
        **options: Options of torch's `fully_shard`: reshard_after_forward, mp_policy, offload_policy.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = int(os.environ.get("WORLD_SIZE", 1))
    if world < 2:
        remedy = "Start the script with torchrun or accelerate launch, or leave `shard` out."
        raise ValueError(complaint("workers", "two or more to shard a model", world, remedy))
    named = dict(model.net.named_modules())
    if unknown := [block for block in blocks if isinstance(block, str) and block not in named]:
        remedy = f"Names are those of model.net, such as {next(name for name in named if name)!r}."
        raise ValueError(complaint("blocks", "names of modules in model.net, or classes", unknown[0], remedy))
    classes = tuple(block for block in blocks if not isinstance(block, str))
    inside = [m for name, m in named.items() if name and (name in blocks or isinstance(m, classes))]
    PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available())  # joins them
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, 0)
    latents = {p for module in model.modules() if isinstance(module, Latent) for p in module.parameters()}
    mesh = init_device_mesh(next(model.parameters()).device.type, (world,))
    for module in (*reversed(inside), model.net):  # from the inside out
        fully_shard(module, mesh=mesh, ignored_params=latents, **options)


def is_sharded(model: Any) -> bool:
    """Whether a model, or a module that holds one, has sharded weights."""
    return bool(_parts(model))


def _parts(model: Any) -> list[Any]:
    """Returns the modules whose weights are gathered together, the outermost first."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def whole(model: Any) -> Iterator[None]:
    """Gathers all weights for a block, in which workers may then call the network unequally often."""
    parts = _parts(model)
    for part in parts:
        part.unshard()
    for part in parts[1:]:  # the first never reshards after its forward
        part.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        reshard(model)
        for part in parts[1:]:
            part.set_reshard_after_forward(True, recurse=False)


def reshard(model: Any) -> None:
    """Frees what the last forward pass gathered: the outermost weights stay whole until a backward pass."""
    for part in _parts(model):
        part.reshard()


def _is_part(value: Any) -> bool:
    return hasattr(value, "to_local")  # a DTensor


def average_gradients(model: Any) -> None:
    """Averages the gradients of what is not sharded over the workers."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None and not _is_part(p)]
    if gradients:
        mean = parameters_to_vector(gradients)
        dist.all_reduce(mean)
        vector_to_parameters(mean / dist.get_world_size(), gradients)


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
    """Limits the norm of gradients, of which some are sharded; returns the norm before."""
    kinds = [[p for p in parameters if _is_part(p) == sharded] for sharded in (True, False)]
    norms: list[Any] = [get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds if kind]
    norm: Tensor = torch.stack([norm.full_tensor() if _is_part(norm) else norm for norm in norms]).norm()
    for kind in kinds:
        clip_grads_with_norm_(kind, limit, norm)
    return norm


def gathered(tensor: Any) -> Tensor:
    """Returns a tensor that may be sharded as a whole, in the main worker's memory; all workers take part."""
    if not _is_part(tensor):
        return tensor  # type: ignore[no-any-return]
    whole = tensor.full_tensor()
    return whole.cpu() if dist.get_rank() == 0 else whole.new_empty(0)  # type: ignore[no-any-return]


def sharded_like(name: str, tensor: Tensor, model: Any, optimisers: Sequence[torch.optim.Optimizer]) -> Tensor:
    """Returns a tensor of a checkpoint ("model/net.0.weight", "optimiser0/3/exp_avg") sharded like its parameter."""
    if not is_sharded(model):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    kind, _, key = name.partition("/")
    like = model.state_dict().get(key)
    if kind.startswith("optimiser"):
        groups = optimisers[int(kind.removeprefix("optimiser"))].param_groups
        like = [p for group in groups for p in group["params"]][int(key.partition("/")[0])]
    if not _is_part(like) or like.shape != tensor.shape:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
