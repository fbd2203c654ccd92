"""Which modules of a network get a latent, and why the others do not."""

import fnmatch
import glob
from collections.abc import Container, Iterable, Sequence
from typing import Any

from torch import nn

from ibnn.errors import complaint, did_you_mean
from ibnn.layers.registry import has_forward_of_its_type, layer_type

Pattern = str | type[nn.Module]
Patterns = Pattern | Sequence[Pattern]
Modules = dict[str, nn.Module]  # by their names in the network

_NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def reasons(
    net: nn.Module, modules: Modules, include: Patterns | None, exclude: Patterns | None
) -> dict[str, str | None]:
    """Returns why each module gets no latent, None for those that get one."""
    found = {name: _why_not(net, name, module) for name, module in modules.items()}
    idle = _idle(net)
    found |= {name: "does not run with the adapters set as they are" for name, m in modules.items() if m in idle}
    convertible = [name for name, reason in found.items() if reason is None]
    optional = {name: kind.optional for name in convertible if (kind := layer_type(modules[name])) and kind.optional}
    if include is None:
        found |= optional
    else:
        chosen = _matches(modules, convertible, include, "include", by_itself=optional)
        found |= {name: "not in include" for name in convertible if name not in chosen}
    if exclude is not None:
        left_out = _matches(modules, list(modules), exclude, "exclude")
        found |= {name: "excluded" for name in convertible if name in left_out}
    return found


def _why_not(net: nn.Module, name: str, module: nn.Module) -> str | None:
    """Returns why a module cannot carry a latent, or None."""
    parent = net.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention) and parent is not module:
        return "read by nn.MultiheadAttention without a call: its nodes are in the latent there"
    kind = layer_type(module)
    if kind is None:
        if isinstance(module, _NORMALISATIONS):
            return "normalisation: scales and shifts, no input weights"
        if isinstance(module, nn.EmbeddingBag):
            return "looks rows up: has no inputs to multiply"
        return f"no latent for {type(module).__name__}: see ibnn.register_layer"
    if not (dtype := next(module.parameters()).dtype).is_floating_point:
        return f"its weight is of dtype {dtype}"
    if hasattr(module, "latent"):
        return "has an attribute `latent` of its own"
    if isinstance(module, nn.MultiheadAttention) and (module.bias_k is not None or module.add_zero_attn):
        return "adds keys (add_bias_kv, add_zero_attn)"
    if isinstance(module, nn.LSTM) and module.proj_size:
        return "projects its state (proj_size)"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "rescales its weight at every call (max_norm)"
    if kind.run is not None and not ("forward" not in vars(module) and has_forward_of_its_type(module)):
        return "its class has a forward of its own"
    return None


def _idle(net: nn.Module) -> set[nn.Module]:
    """Returns what peft keeps but does not run: inactive adapters, and the originals of modules that it replaces."""
    idle: set[nn.Module] = set()
    for owner in net.modules():
        held: Any = {name: owner._modules.get(name) or {} for name in getattr(type(owner), "adapter_layer_names", ())}
        if not held:
            continue
        off = owner.disable_adapters or getattr(owner, "merged", False)
        active: Any = [] if off else owner.active_adapters
        idle |= {m for parts in held.values() for adapter, part in parts.items() if adapter not in active
                 for m in part.modules()}  # fmt: skip
        if any(adapter in held.get("modules_to_save", {}) for adapter in active):
            idle |= set(owner.original_module.modules())  # type: ignore[union-attr]
    return idle


def _matches(
    modules: Modules, candidates: list[str], patterns: Patterns, argument: str, by_itself: Container[str] = ()
) -> set[str]:
    """Returns what each pattern matches, at least one candidate; those `by_itself` need their full name or class."""
    matched: set[str] = set()
    alone = isinstance(patterns, str | type) or not isinstance(patterns, Iterable)
    listed: list[Any] = [patterns] if alone else list(patterns)  # type: ignore[arg-type]
    if not listed or not all(isinstance(pattern, str | type) for pattern in listed):
        raise ValueError(complaint(argument, "names, globs or classes of layers", patterns, 'Pass e.g. ["conv1"].'))
    for pattern in listed:
        if isinstance(pattern, str):
            hits = {n for n in candidates if fnmatch.fnmatchcase(n, pattern) or n.startswith(pattern + ".")}
        else:
            hits = {n for n in candidates if isinstance(modules[n], pattern)}
        wide = pattern is nn.Module or isinstance(pattern, str)
        hits -= {n for n in hits if n in by_itself and wide and pattern not in (n, glob.escape(n))}
        if not hits:
            remedy = did_you_mean(pattern, candidates, otherwise="ibnn.plan(net) lists the layers.")
            raise ValueError(complaint(argument, "patterns that match layers of the network", repr(pattern), remedy))
        matched |= hits
    return matched
