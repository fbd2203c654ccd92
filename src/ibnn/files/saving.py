"""FILES: a model as safetensors and JSON, its latents alone as an adapter, several adapters on one net, the hub.

Nothing here unpickles: a file can hold wrong numbers, never code. Every check comes before the first change.
"""

import copy as copying
import glob
import hashlib
import importlib
import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from ibnn._version import __version__
from ibnn.convert import convert, plan
from ibnn.errors import complaint
from ibnn.inputs import Pick
from ibnn.latent import Latent
from ibnn.layers.registry import layer_type
from ibnn.likelihood import LIKELIHOODS, Bernoulli, Categorical, Gaussian, Heads, Likelihood
from ibnn.network import IBNN, NUMBERS

Folder = str | os.PathLike[str]
FORMAT_VERSION, CONFIG = 1, "config.json"
FILES = {False: "model.safetensors", True: "latents.safetensors"}  # by latents_only
_FUNCTION = {"function": True}  # stands for a function, which no file holds
_ATTRIBUTES = ("components", "prior_std", "kl_kind", "eval_samples", "eval_seed")


def save_pretrained(model: IBNN, directory: Folder, *, latents_only: bool = False) -> None:
    """Writes a model to a folder: its tensors as safetensors, the rest as `config.json`.

    Both files are complete on disk before either is renamed into place; an older save stays whole until then. Killed in
    the instant between the two renames, it leaves a pair that `load` refuses by its checksum.

    Args:
        model: A converted network.
        directory: Where to; made if need be.
        latents_only: Leaves the weights out: a small file that attaches to the same network again.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(convert(net, seed=0), folder)
    ...     sorted(os.listdir(folder))
    ['config.json', 'model.safetensors']
    """
    if not isinstance(model, IBNN) or not model.latents:
        remedy = "Pass what ibnn.convert returned; of a wrapper (DDP, torch.compile), what it wraps."
        raise TypeError(complaint("model", "a converted network", type(model).__name__, remedy))
    folder, file, save_file = Path(directory), FILES[latents_only], extra("safetensors.torch").save_file
    check_replaceable(folder / CONFIG)
    left_out = {*NUMBERS, *(_base(model.net, "net.") if latents_only else ())}  # the config has the numbers
    tensors, tied = _untied({name: tensor for name, tensor in _state(model).items() if name not in left_out})
    config = {
        "format": "ibnn",
        "format_version": FORMAT_VERSION,
        "ibnn_version": __version__,
        "latents_only": bool(latents_only),
        **{name: getattr(model, name) for name in (*_ATTRIBUTES, "gradient_scale")},
        "likelihood": _described(model.likelihood),
        "logits": _FUNCTION if callable(model.logits) else model.logits,
        "layers": {name: latent.nodes for name, latent in model.latents.items()},
        "tied": tied,
        "fingerprint": fingerprint(model.net),
    }
    folder.mkdir(parents=True, exist_ok=True)
    temporary = {name: folder / f".{name}.{uuid4().hex}.tmp" for name in (file, CONFIG)}  # the config comes last
    try:
        save_file(tensors, temporary[file])
        config["sha256"] = _sha256(temporary[file])
        temporary[CONFIG].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        temporary[file].chmod(temporary[CONFIG].stat().st_mode)  # safetensors' files are their owner's alone
        for path in temporary.values():
            _fsync(path, os.O_RDWR)
        for name, path in temporary.items():
            os.replace(path, folder / name)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        _fsync(folder, os.O_RDONLY)


def load(
    directory: Folder,
    net: nn.Module,
    *,
    force: bool = False,
    likelihood: Likelihood | None = None,
    logits: Pick | None = None,
    copy: bool = True,
) -> IBNN:
    """Makes the model that `save_pretrained` wrote, on the device of `net` and in its train or eval mode.

    Args:
        directory: Where it was saved.
        net: A plain network of the same architecture; it stays plain. A full save brings its own weights; latents alone
            need the very weights they were saved with.
        force: Attaches latents to other weights too.
        likelihood: An object like the saved one, needed if its class is your own; its tensors are replaced.
        logits: The function that was given to `convert`, if one was: files hold paths, not code.
        copy: False shares the parameters and buffers of `net` and does not copy them; a full save overwrites them.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> model = convert(net, seed=0).eval()
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(model, folder, latents_only=True)
    ...     again = load(folder, net).eval()
    >>> torch.equal(model(torch.ones(2, 4)), again(torch.ones(2, 4)))
    True
    """
    config = read_config(Path(directory))
    _check_layers(net, config["layers"])
    if config["latents_only"] and not force and (found := fingerprint(net)) != config["fingerprint"]:
        wanted = f"the network that these latents were saved with (weights {config['fingerprint'][:12]}…)"
        remedy = "Load its weights into it first (running statistics count too), or pass force=True."
        raise ValueError(complaint("net", wanted, f"one with other weights ({found[:12]}…)", remedy))
    if logits is None and (logits := config.get("logits")) == _FUNCTION:
        remedy = "Pass the function that was given to convert."
        raise ValueError(complaint("logits", "given: the model was saved with a function", None, remedy))
    tensors = _read_tensors(Path(directory, FILES[config["latents_only"]]), config)
    likelihood = _likelihood(config["likelihood"], likelihood, tensors)
    model = _convert(copying.deepcopy(net) if copy else _share(net), config, likelihood)
    if (order := list(model.latents)) != list(config["layers"]):  # which the draws follow
        remedy = "Define its layers in that order."
        raise ValueError(
            complaint("net", f"a network with layers in the order {list(config['layers'])}", order, remedy)
        )
    left_out = {*NUMBERS, *(_base(model.net, "net.") if config["latents_only"] else ())}
    state = {name: tensor for name, tensor in _state(model).items() if name not in left_out}
    _check_tensors(state, tensors)
    for name, tensor in state.items():  # the saved dtype holds
        tensor.data = tensor.data.to(tensors[name].dtype)
    model.load_state_dict(tensors, strict=False)  # the names were checked
    model.eval_samples, model.eval_seed, model.logits = config["eval_samples"], config["eval_seed"], logits
    model.gradient_scale = config.get("gradient_scale", 1.0)  # files from before it was part of the state have none
    return model


class Adapters(dict[str, IBNN]):
    """Several posteriors on one backbone, by name; each is a model of its own that shares the backbone's weights.

    Switching is a look-up. Components, prior and likelihood may differ. What changes the backbone (training it,
    BatchNorm in train mode) changes it for all; move it to its device before the first load.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> adapters = Adapters(net)
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(convert(net, seed=0), folder, latents_only=True)
    ...     model = adapters.load("first", folder)
    >>> list(adapters), adapters["first"].net[0].weight is net[0].weight
    (['first'], True)
    """

    def __init__(self, net: nn.Module) -> None:
        """Takes the backbone, a plain network; it stays one."""
        super().__init__()
        self.net = net

    def load(self, name: str, directory: Folder, *, force: bool = False, likelihood: Likelihood | None = None) -> IBNN:
        """Adds a save of latents only under a name; see `ibnn.load`."""
        if not read_config(Path(directory))["latents_only"]:
            remedy = "Save it with latents_only=True: a whole model would overwrite the backbone."
            raise ValueError(complaint("directory", "a save of latents only", "one of a whole model", remedy))
        self[name] = load(directory, self.net, force=force, likelihood=likelihood, copy=False)
        return self[name]

    def __missing__(self, name: str) -> IBNN:
        remedy = f"Load it: adapters.load({name!r}, directory)."
        raise KeyError(complaint("name", f"one of {list(self)}", repr(name), remedy))


def fingerprint(net: nn.Module) -> str:
    """SHA-256 of a network's parameters and persistent buffers but for latents: names, dtypes, shapes and bytes.

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


def _convert(net: nn.Module, config: dict[str, Any], likelihood: Likelihood) -> IBNN:
    """Puts latents on the saved layers, in place."""
    layers, options = config["layers"], {name: config[name] for name in ("components", "prior_std")}
    chosen = [glob.escape(name) for name in layers]
    # a pattern takes in what is inside a layer, too
    inside = [glob.escape(layer.name) for layer in plan(net, include=chosen).layers if layer.name not in layers]
    options |= {"include": chosen, "exclude": inside or None, "kl": config["kl_kind"]}
    return convert(net, likelihood=likelihood, copy=False, seed=0, **options)


def _check_layers(net: nn.Module, saved: dict[str, int]) -> None:
    """Raises unless the network has the saved layers, and values to its tensors."""
    found = {name: kind.nodes(module) for name, module in net.named_modules() if (kind := layer_type(module))}
    plan(net, include=[glob.escape(name) for name in saved if name in found] or None)  # is it a plain network?
    remedy = "Build it as it was when the model was saved (and register its own layer types: ibnn.register_layer)."
    for name, nodes in saved.items():
        if found.get(name) != nodes:
            got = f"one of {found[name]}" if name in found else "none of that name"
            raise ValueError(complaint("net", f"a network with a layer {name!r} of {nodes} nodes", got, remedy))
    _state(net)


def _check_tensors(state: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Raises unless names and shapes agree, and names that are tied in the network have equal saved values."""
    first: dict[int, str] = {}
    for name in {**state, **saved}:
        has, had = (tuple(tensors[name].shape) if name in tensors else "absent" for tensors in (state, saved))
        if has != had:
            argument = "likelihood" if name.startswith("likelihood.") else "net"
            remedy = "Build it as it was when the model was saved."
            raise ValueError(complaint(argument, f"like the saved one, where {name!r} is {had}", has, remedy))
        twin = first.setdefault(id(state[name]), name)
        if saved[twin] is not saved[name] and not torch.equal(saved[twin], saved[name]):
            wanted = f"a network where {twin!r} and {name!r} are apart, as saved"
            raise ValueError(complaint("net", wanted, "one that ties them", "Build it without that tie."))


def _described(likelihood: Likelihood) -> dict[str, Any]:
    """Class and options of a likelihood; of several heads, those of each."""
    if isinstance(likelihood, Heads):
        return {"name": "Heads", "heads": {name: _described(head) for name, head in likelihood.each()}}
    return {"name": type(likelihood).__name__, "options": _options(likelihood)}


def _options(likelihood: Likelihood) -> dict[str, Any] | None:
    """Constructor options that are not in the state; None for a class that `load` does not know."""
    if type(likelihood) is Categorical:
        return {name: getattr(likelihood, name) for name in ("ignore_index", "label_smoothing", "axis")}
    if type(likelihood) is Gaussian:
        return {"noise": likelihood.noise, "outputs": 1 if likelihood.log_std is None else len(likelihood.log_std)}
    return {} if type(likelihood) is Bernoulli else None


def _likelihood(
    saved: dict[str, Any], given: Likelihood | None, tensors: dict[str, Tensor], prefix: str = "likelihood."
) -> Likelihood:
    """A likelihood of the saved class that the saved tensors fit."""
    name, options = saved["name"], saved.get("options")
    if given is None and "heads" in saved:
        heads = enumerate(saved["heads"].items())
        return Heads({name: _likelihood(of, None, tensors, f"{prefix}heads.{n}.") for n, (name, of) in heads})
    known = {cls.__name__: cls for cls in LIKELIHOODS.values()}
    if (options is None or name not in known) if given is None else type(given).__name__ != name:
        got, remedy = (
            type(given).__name__,
            f"Pass likelihood={name}(…) with its options: the file has only its tensors.",
        )
        raise ValueError(complaint("likelihood", f"an object of the saved class, {name}", got, remedy))
    if given is not None:
        return copying.deepcopy(given)
    weight = {"weight": tensors[f"{prefix}weight"].clone()} if f"{prefix}weight" in tensors else {}
    return known[name](**(options or {}), **weight)


def read_config(folder: Path) -> dict[str, Any]:
    """The checked content of `config.json`."""
    path, again = folder / CONFIG, "Copy or download it again."
    if not path.is_file():
        raise FileNotFoundError(complaint("directory", f"one with a {CONFIG}", repr(str(folder)), "Check the path."))
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(complaint(str(path), "JSON", f"a damaged file ({error})", again)) from error
    if not isinstance(config, dict) or config.get("format") != "ibnn":
        raise ValueError(complaint(str(path), "written by ibnn", "another file", "Pass the folder of a save."))
    if (version := config.get("format_version")) != FORMAT_VERSION:
        got, remedy = f"{version} (by ibnn {config.get('ibnn_version')})", "Upgrade: pip install -U ibnn."
        raise ValueError(complaint(str(path), f"of format version {FORMAT_VERSION}", got, remedy))
    needed = {"latents_only", *_ATTRIBUTES, "likelihood", "layers", "tied", "fingerprint", "sha256"}
    if missing := sorted(needed - set(config)):
        raise ValueError(complaint(str(path), "complete", f"one without {missing}", again))
    return config


def _read_tensors(path: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file that has the saved checksum, tied ones under all their names."""
    if not path.is_file():
        raise FileNotFoundError(complaint(str(path), f"there beside its {CONFIG}", "no such file", "Copy it too."))
    if (found := _sha256(path)) != config["sha256"]:
        got = f"a damaged file, or one of another save ({found[:12]}…)"
        raise ValueError(complaint(str(path), f"as saved (sha256 {config['sha256'][:12]}…)", got, "Copy it again."))
    load_file = extra("safetensors.torch").load_file
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except Exception as error:  # whatever safetensors finds wrong with it
        raise ValueError(complaint(str(path), "a safetensors file", str(error), "Get it from its author.")) from error
    tensors.setdefault("likelihood.temperature", torch.ones(()))  # saves from before there was one
    return {**tensors, **{name: tensors[kept] for name, kept in config["tied"].items()}}


def _state(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a state dict; tied ones are the same object."""
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.is_meta:
            got = f"{name!r}, {'on the meta device' if isinstance(value, Tensor) else type(value).__name__}"
            raise TypeError(complaint("net", "a network whose state is tensors with values", got, "Make it so first."))
    return state


def _base(net: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a network that are not latents."""
    modules = net.named_modules(remove_duplicate=False)
    latents = tuple(f"{name}." for name, module in modules if isinstance(module, Latent))
    return {prefix + name: tensor for name, tensor in _state(net).items() if not name.startswith(latents)}


def _untied(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, none sharing memory, and for every name left out the one that stands for it."""
    first: dict[int, str] = {}
    tied = {name: kept for name, tensor in state.items() if (kept := first.setdefault(id(tensor), name)) != name}
    apart = {name: tensor.detach().cpu() for name, tensor in state.items() if name not in tied}
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in apart.items()}, tied


def _share(net: nn.Module) -> nn.Module:
    """A copy of the modules around the very same parameters and buffers."""
    return copying.deepcopy(net, {id(tensor): tensor for tensor in [*net.parameters(), *net.buffers()]})


def check_replaceable(path: Path) -> None:
    """Raises if a config is not ours to overwrite."""
    if path.exists() and b'"format": "ibnn"' not in path.read_bytes():
        remedy = "Choose another place: a transformers model, for one, keeps its own file of that name."
        raise FileExistsError(complaint(str(path), "free or written by ibnn", "another program's file", remedy))


def extra(module: str) -> Any:
    """An optional package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = 'Run: pip install "ibnn[hub]".'
        raise ImportError(complaint(module, "installed, to save and load", str(error), remedy)) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
