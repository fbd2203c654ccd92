"""Saves and loads models, whole or as latents alone.

Every check comes before the first change. What the files are is in `model_folder`.
"""

import copy as copying
import glob
import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from ibnn import check, nets
from ibnn.convert import convert, plan
from ibnn.errors import complaint
from ibnn.files import model_folder
from ibnn.files.sealed import extra
from ibnn.generators import generators_restored
from ibnn.inputs import Pick
from ibnn.latent import Latent
from ibnn.layers.registry import duplicate, layer_type
from ibnn.likelihood import Heads, Likelihood
from ibnn.likelihood.one_pass import SAVED
from ibnn.nets.dense import Affine
from ibnn.network import IBNN, NUMBERS, make_room
from ibnn.threads import one_at_a_time

Folder = str | os.PathLike[str]
Architecture = Mapping[str, Any] | Sequence[Mapping[str, Any]]

METHODS: dict[str, type[nn.Module]] = {}  # other methods that can be saved, by class name: see `register_method`
_FUNCTION = {"function": True}  # stands for a function, which no file holds
_FORM = ("draws", "where", "bias_latents")
_ATTRIBUTES = ("components", "prior_std", "kl_kind", "eval_samples", "eval_seed", "gradient_scale", *_FORM)


@one_at_a_time
def save_pretrained(
    model: nn.Module, directory: Folder, *, latents_only: bool = False, architecture: Architecture | None = None
) -> None:
    """Writes a model to a folder: its tensors as safetensors, the rest as `config.json`.

    A process that is killed meanwhile leaves the older save or this one, whole.

    Args:
        model: A converted network, or a baseline of `ibnn.baselines`.
        directory: Where to; made if need be.
        latents_only: Leaves the weights out: a small file that attaches to the same network again.
        architecture: How `load` builds the network where it is given none: {"name": …, "options": {…}}, as
            `ibnn.nets.make` takes them, or a list of these for an `nn.Sequential`, in which {"name": "affine",
            "options": {"scale": …, "shift": …}} is a fixed change of units.

    >>> import tempfile
    >>> net = nets.make("mlp", classes=3, inputs=4, hidden=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(convert(net, seed=0), folder)
    ...     sorted(os.listdir(folder))
    ['config.json', 'model.safetensors']
    """
    described, folder = _description(model), check.path("directory", directory, folder=True)
    if latents_only and not isinstance(model, IBNN):
        raise ValueError(complaint("latents_only", "False for a baseline", True, "Leave it out: it has no latents."))
    tensors = _saved_state(model, latents_only)
    config = {"latents_only": bool(latents_only), **described, "fingerprint": fingerprint(cast(nn.Module, model.net))}
    if architecture is not None:
        config["architecture"] = extra("ibnn.files.schema").checked_architecture(architecture)
    model_folder.write(folder, tensors, config)


def load(
    directory: Folder,
    net: nn.Module | None = None,
    *,
    likelihood: Likelihood | None = None,
    logits: Pick | None = None,
    copy: bool = True,
) -> IBNN:
    """Returns the model that `save_pretrained` wrote, on the device of `net` and in its train or eval mode.

    Args:
        directory: Where it was saved.
        net: A plain network of the same architecture; it stays plain. A full save brings its own weights; latents alone
            need the very weights they were saved with. None builds the saved `architecture`, in eval mode.
        likelihood: An object like the saved one, needed if its class is your own; its tensors are replaced.
        logits: The function that was given to `convert`, if one was: files hold paths, not code.
        copy: False shares the parameters and buffers of `net` and does not copy them; a full save overwrites them.

    >>> import tempfile
    >>> architecture = {"name": "mlp", "options": {"classes": 3, "inputs": 4, "hidden": 8}}
    >>> model = convert(nets.make("mlp", classes=3, inputs=4, hidden=8), seed=0).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(model, folder, architecture=architecture)
    ...     again = load(folder)
    >>> torch.equal(model(torch.ones(2, 4)), again(torch.ones(2, 4)))
    True
    """
    folder = check.path("directory", directory, folder=True)
    config = model_folder.read_config(folder)
    described: list[dict[str, Any]] = config.get("members") or [config]
    methods = {of["method"] for of in (config, *described) if "method" in of}
    if methods - set(METHODS):
        importlib.import_module("ibnn.one_pass")  # it and what it imports register all methods of the library
    if unknown := methods - set(METHODS):
        remedy = "Import the module that registers it, with ibnn.files.saving.register_method."
        raise ValueError(complaint("directory", "a save of a method that is imported", unknown.pop(), remedy))
    tensors = model_folder.read_tensors(folder, config)
    if net is None:
        net, copy = _build(config, tensors), False
    elif not isinstance(net, nn.Module):
        raise TypeError(complaint("net", "an nn.Module", type(net).__name__, "Pass the plain network."))
    for of in (of for of in described if "layers" in of):
        _check_net(net, of)
        if logits is None and isinstance(of["logits"], dict):
            raise ValueError(complaint("logits", "a function, as for convert", None, "Pass it: files hold no code."))
    if config["latents_only"] and (digest := fingerprint(net)) != config["fingerprint"]:
        expected = f"the network that these latents were saved with (weights {config['fingerprint'][:12]}…)"
        remedy = "Load its weights into it first; running statistics count too."
        raise ValueError(complaint("net", expected, f"one with other weights ({digest[:12]}…)", remedy))
    weights = sum(p.numel() for p in net.parameters() if not config["latents_only"])
    latents = [2 * of["components"] * sum(of["layers"].values()) for of in described if "layers" in of]
    _check_size(max(len(described) * weights, sum(latents)), tensors)
    net = duplicate(net, {} if copy else {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())})
    models, own_nets = [], [net, *(duplicate(net) for _ in described[1:])]
    for number, (of, own) in enumerate(zip(described, own_nets, strict=True)):
        with _refused_as("likelihood"):
            prefix = f"members.{number}.likelihood." if "members" in config else "likelihood."
            read = _likelihood(of["likelihood"], likelihood, tensors, prefix)
        models.append(_made(own, of, read, logits))
    with _refused_as("members"):
        model: Any = METHODS[config["method"]](models) if "members" in config else models[0]
    make_room(model, tensors)
    for number, member in enumerate(getattr(model, "members", ())):
        make_room(member, tensors, f"members.{number}.")
    state = _saved_state(model, config["latents_only"])
    check_tensors(state, tensors)
    for name, tensor in state.items():
        tensor.data = tensor.data.to(tensors[name].dtype)
    model.load_state_dict(tensors, strict=False)  # the names were checked
    return cast(IBNN, model)


def _made(net: nn.Module, config: dict[str, Any], likelihood: Likelihood, logits: Pick | None) -> nn.Module:
    """Returns a model of one network as it is described, without its tensors."""
    if "method" in config:
        with _refused_as("options"):
            return METHODS[config["method"]](net, likelihood, **config["options"])
    model = converted(net, config, likelihood)
    for name in ("eval_samples", "eval_seed", "gradient_scale"):
        setattr(model, name, config[name])
    model.logits = config["logits"] if logits is None else logits
    return model


def register_method(*classes: type[nn.Module]) -> None:
    """Lets baselines be saved and loaded.

    Each is made of a network (or, of several `components`, a list of them), a likelihood, and its `options`.
    """
    METHODS.update({cls.__name__: cls for cls in classes})


def fingerprint(net: nn.Module) -> str:
    """Returns the SHA-256 of a network's parameters and persistent buffers, latents excluded: names, types and bytes.

    Buffers count because they are part of the function: the running statistics of BatchNorm above all.

    >>> net = nn.Linear(3, 2)
    >>> fingerprint(convert(net).net) == fingerprint(net)
    True
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(_base(net).items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _build(config: dict[str, Any], tensors: dict[str, Tensor]) -> nn.Module:
    """Returns a network of the saved architecture, in eval mode; code that a save names is never imported."""
    architecture, remedy = config.get("architecture"), "Build the network yourself: load(directory, net), or --net."
    if config["latents_only"] or architecture is None:
        why = "holds latents only" if config["latents_only"] else "names no architecture"
        raise ValueError(complaint("net", f"given: the save {why}", None, remedy))
    parts = architecture if isinstance(architecture, list) else [architecture]
    if code := [part["name"] for part in parts if ":" in part["name"]]:
        expected = f"given: its code is your own ({code[0]}), which load does not import"
        raise ValueError(complaint("net", expected, None, remedy))

    def part(name: str, options: Mapping[str, Any] = {}) -> nn.Module:
        return Affine(**options) if name == "affine" else nets.make(name, **options)

    def built() -> nn.Module:
        made = [part(**described) for described in parts]
        return nn.Sequential(*made) if isinstance(architecture, list) else made[0]

    with _refused_as("architecture"), generators_restored():  # initial weights are replaced
        with torch.device("meta"):  # takes no memory
            _check_size(sum(tensor.numel() for tensor in built().state_dict().values()), tensors)
        return built().eval()


@contextmanager
def _refused_as(key: str) -> Iterator[None]:
    """Turns whatever a constructor raises about its options into one error that names their key in the config."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"The {key} in {model_folder.CONFIG} cannot be built: {error}") from error


def _check_size(numbers: int, tensors: dict[str, Tensor]) -> None:
    """Raises if a config describes more numbers than the file of tensors holds, before memory is taken for them."""
    if numbers > (held := sum(tensor.numel() for tensor in tensors.values())):
        raise ValueError(f"{model_folder.CONFIG} describes {numbers:,} numbers, and the file holds {held:,}.")


def _description(model: nn.Module) -> dict[str, Any]:
    """Returns what a model is besides its tensors, as JSON holds it; raises for what cannot be saved."""
    if METHODS.get(type(model).__name__) is type(model):
        method: Any = model
        own = {"method": type(model).__name__, "components": method.components, "options": method.options}
        members = [_description(member) for member in getattr(model, "members", ())]
        return own | {"likelihood": _described(method.likelihood)} | ({"members": members} if members else {})
    if not isinstance(model, IBNN) or not model.latents:
        remedy = "Pass what ibnn.convert returned; of a wrapper (DDP, torch.compile), what it wraps."
        raise TypeError(complaint("model", "a converted network", type(model).__name__, remedy))
    return {
        **{name: getattr(model, name) for name in _ATTRIBUTES},
        "likelihood": _described(model.likelihood),
        "logits": _FUNCTION if callable(model.logits) else model.logits,
        "layers": {name: latent.nodes for name, latent in model.latents.items()},
    }


def converted(net: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> IBNN:
    """Puts latents on the saved layers, in place; raises if they are not in the saved order, which the draws follow."""
    layers, form = config["layers"], {name: config[name] for name in ("components", "prior_std", *_FORM)}
    chosen = [glob.escape(name) for name in layers]
    # a pattern takes in what is inside a layer, too
    inside = [glob.escape(layer.name) for layer in plan(net, include=chosen).layers if layer.name not in layers]
    form |= {"include": chosen, "exclude": inside or None, "kl": config["kl_kind"]}
    model = convert(net, likelihood=likelihood, copy=False, seed=0, **form)
    if (order := list(model.latents)) != list(layers):
        expected, remedy = f"a network with layers in the order {list(layers)}", "Define its layers in that order."
        raise ValueError(complaint("net", expected, order, remedy))
    return model


def _described(likelihood: Likelihood) -> dict[str, Any]:
    """Returns class and constructor options of a likelihood, beside its state; of several heads, those of each."""
    if isinstance(likelihood, Heads):
        return {"name": "Heads", "heads": {name: _described(head) for name, head in likelihood.each()}}
    known = type(likelihood) in SAVED  # `load` cannot make another
    return {"name": type(likelihood).__name__, "options": likelihood.options if known else None}


def _likelihood(saved: dict[str, Any], given: Likelihood | None, tensors: dict[str, Tensor], prefix: str) -> Likelihood:
    """Returns a likelihood of the saved class that the saved tensors fit."""
    name, options = saved["name"], saved.get("options")
    if given is None and "heads" in saved:
        heads = enumerate(saved["heads"].items())
        return Heads({name: _likelihood(of, None, tensors, f"{prefix}heads.{n}.") for n, (name, of) in heads})
    known = {cls.__name__: cls for cls in SAVED}
    if (options is None or name not in known) if given is None else type(given).__name__ != name:
        expected, remedy = f"an object of the saved class, {name}", f"Pass likelihood={name}(…) with its options."
        raise ValueError(complaint("likelihood", expected, type(given).__name__, remedy))
    if given is not None:
        return copying.deepcopy(given)
    made = known[name](**options)  # type: ignore[arg-type]
    for own in ("weight", "location", "scale"):  # whose shapes options do not tell
        if prefix + own in tensors:
            setattr(made, own, tensors[prefix + own].clone())
    return made


def _check_net(net: nn.Module, config: dict[str, Any]) -> None:
    """Raises unless a network is plain, has the saved layers, and its tensors have values."""
    from ibnn.contrib.sides import sides_of

    saved: dict[str, int] = config["layers"]
    at = [config[name] for name in ("where", "bias_latents")]
    found = {name: sides_of(module, *at).nodes for name, module in net.named_modules() if layer_type(module)}
    plan(net, include=[glob.escape(name) for name in saved if name in found] or None)  # is it a plain network?
    remedy = "Build it as it was when the model was saved (and register its own layer types: ibnn.register_layer)."
    for name, nodes in saved.items():
        if found.get(name) != nodes:
            got = f"one of {found[name]}" if name in found else "none of that name"
            raise ValueError(complaint("net", f"a network with a layer {name!r} of {nodes} nodes", got, remedy))
    _state(net)


def check_tensors(state: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Raises unless names and shapes agree, and names that are tied in the network have equal saved values."""
    first: dict[int, str] = {}
    for name in {**state, **saved}:
        has, had = (tuple(tensors[name].shape) if name in tensors else "absent" for tensors in (state, saved))
        if has != had:
            argument = "likelihood" if name.startswith("likelihood.") else "net"
            raise ValueError(complaint(argument, f"like the saved one, where {name!r} is {had}", has, "Build it so."))
        twin = first.setdefault(id(state[name]), name)
        if saved[twin] is not saved[name] and not torch.equal(saved[twin], saved[name]):
            expected = f"a network where {twin!r} and {name!r} are apart, as saved"
            raise ValueError(complaint("net", expected, "one that ties them", "Build it without that tie."))


def _saved_state(model: Any, latents_only: bool) -> dict[str, Tensor]:
    """Returns the tensors of a model that its file holds."""
    left_out = {*NUMBERS, *(_base(model.net, "net.") if latents_only else ())}
    return {name: tensor for name, tensor in _state(model).items() if name not in left_out}


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a state dict; tied ones are the same object."""
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.is_meta:
            got = f"{name!r}, {'on the meta device' if isinstance(value, Tensor) else type(value).__name__}"
            raise TypeError(complaint("net", "a network whose state is tensors with values", got, "Make it so first."))
    return state


def _base(net: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Returns the tensors of a network that are not latents."""
    modules = net.named_modules(remove_duplicate=False)
    latents = tuple(f"{name}." for name, module in modules if isinstance(module, Latent))
    return {prefix + name: tensor for name, tensor in _state(net).items() if not name.startswith(latents)}
