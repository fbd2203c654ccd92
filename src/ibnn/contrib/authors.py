"""Reads checkpoints of the method's published code into converted networks.

There a layer has, beside `weight` and `bias`: `posterior_U_mean` and `posterior_U_std`, (K, D, 1, …), with σ = softplus
of the latter; where it has a bias, `posterior_B_mean` and `posterior_B_std`, (K, 1, …), of one factor on the bias; and
`prior_mean` and `prior_std`. The code of the authors' later work, on covariate shift, has no factors on biases, and D
counts a layer's inputs, its outputs, or its inputs and then its outputs.
"""

import copy
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ibnn import check
from ibnn.contrib.sides import sides_of
from ibnn.convert import Where
from ibnn.errors import complaint
from ibnn.files.saving import check_tensors, converted
from ibnn.layers.registry import layer_type
from ibnn.network import IBNN

_OWN = ("posterior_U_mean", "posterior_U_std", "posterior_B_mean", "posterior_B_std", "prior_mean", "prior_std")
_BUILD = "Build the network with the names and sizes of the checkpoint's."
Layers = dict[str, dict[str, Tensor]]  # tensors that plain layers do not have, by layer and name


def load_authors(
    checkpoint: Mapping[str, Tensor], net: nn.Module, *, where: Where = "input", likelihood: Any = "categorical"
) -> IBNN:
    """Returns a converted network with the weights and latents of the authors' code; its KL is "mean", as theirs.

    Args:
        checkpoint: A state dict, such as `torch.load(path, weights_only=True)` returns.
        net: A plain network whose layers have the names and sizes of the checkpoint's.
        where: Which nodes its `posterior_U` are of: "input" (the published method), or, from the code of the later
            work, "output" or "both".
        likelihood: As in `convert`.

    >>> state = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    >>> state |= {"prior_mean": torch.tensor(1.0), "prior_std": torch.tensor(0.3)}
    >>> state |= {"posterior_U_mean": torch.ones(4, 3), "posterior_U_std": torch.zeros(4, 3)}
    >>> state |= {"posterior_B_mean": torch.ones(4, 1), "posterior_B_std": torch.zeros(4, 1)}
    >>> model = load_authors(state, nn.Linear(3, 2))
    >>> model.components, model.nodes, model.bias_latents
    (4, 4, 'layer')
    """
    check.choice("where", where, get_args(Where))
    layers, weights = _split(_read(checkpoint))
    found = ((len(own["posterior_U_mean"]), own["prior_mean"], own["prior_std"]) for own in layers.values())
    priors = {(float(count), float(mean), float(std)) for count, mean, std in found}
    components, prior_mean, prior_std = next(iter(priors))
    if len(priors) > 1 or prior_mean != 1:
        expected = "one whose layers share the number of components, prior_std, and a prior_mean of 1"
        raise ValueError(complaint("checkpoint", expected, sorted(priors), "Others are not of convert's form."))
    bias_latents: Any = "layer" if any("posterior_B_mean" in own for own in layers.values()) else "none"
    described = {"components": int(components), "prior_std": prior_std, "kl_kind": "mean", "draws": "channel"}
    described |= {"where": where, "bias_latents": bias_latents}
    described["layers"] = _in_order(net, layers, where, bias_latents)
    check_tensors(net.state_dict(keep_vars=True), weights)
    model = converted(copy.deepcopy(net), described, likelihood)
    model.net.load_state_dict(weights, strict=False)  # names and shapes were checked; latents have names of their own
    with torch.no_grad():
        for name, latent in model.latents.items():
            latent.mean.copy_(_joined(layers[name], "mean"))
            latent.rho.copy_(_joined(layers[name], "std"))  # σ = softplus(ρ) there, too
    return model


def _read(state: Any) -> dict[str, Tensor]:
    """Returns the tensors of a state dict, without the prefix that DistributedDataParallel adds."""
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        got = str(sorted(map(str, state))[:5]) if isinstance(state, Mapping) else type(state).__name__
        remedy = "Pass the part of it that is one, such as torch.load(path, weights_only=True)['model']."
        raise ValueError(complaint("checkpoint", "a state dict: tensors by name", got, remedy))
    prefixed = all(name.startswith("module.") for name in state)
    return {name.removeprefix("module.") if prefixed else name: value for name, value in state.items()}


def _split(state: Mapping[str, Tensor]) -> tuple[Layers, dict[str, Tensor]]:
    """Returns what layers have beside weights, by layer, and the weights by name; raises if no layer has any."""
    layers: Layers = {}
    for name, tensor in state.items():
        layer, _, key = name.rpartition(".")
        if key in _OWN:
            layers.setdefault(layer, {})[key] = tensor
    if not layers:
        expected, got = "one of the authors' code, with posterior_U_mean", f"names such as {sorted(state)[:3]}"
        raise ValueError(complaint("checkpoint", expected, got, "For one of this library use ibnn.load."))
    return layers, {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] not in _OWN}


def _in_order(net: nn.Module, layers: Layers, where: Where, bias_latents: Any) -> dict[str, int]:
    """Returns the number of latents of each layer in the network's order; raises unless they are the checkpoint's."""
    modules = dict(net.named_modules())
    for name, own in layers.items():
        if name not in modules or layer_type(modules[name]) is None:
            got = f"a {type(modules[name]).__name__}" if name in modules else "none of that name"
            raise ValueError(complaint("net", f"a network with a layer {name!r} that can have latents", got, _BUILD))
        fits = {form: sides_of(modules[name], form, bias_latents).nodes for form in get_args(Where)}
        mean, std = _joined(own, "mean").shape, _joined(own, "std").shape
        if mean != std or mean[1] != fits[where]:
            others = [form for form, count in fits.items() if mean == std and mean[1] == count]
            remedy = f"Pass where={others[0]!r}." if others else _BUILD
            expected = f"one with {fits[where]} latents on layer {name!r} (where={where!r})"
            got = f"means of shape {tuple(mean)} and deviations of shape {tuple(std)}"
            raise ValueError(complaint("checkpoint", expected, got, remedy))
    return {name: sides_of(module, where, bias_latents).nodes for name, module in modules.items() if name in layers}


def _joined(own: Mapping[str, Tensor], what: str) -> Tensor:
    """Returns mean or std of a layer's latents, (K, nodes): those of nodes, then that of the bias."""
    names = (f"posterior_{of}_{what}" for of in "UB")
    return torch.cat([own[name].flatten(1) for name in names if name in own], 1)
