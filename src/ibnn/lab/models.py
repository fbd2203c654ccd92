"""MODELS of jobs: the untrained network and method, and whether they fit the data."""

from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ibnn import nets
from ibnn.data import TABLES, Units
from ibnn.errors import complaint
from ibnn.inputs import logits_of
from ibnn.lab.job import METHODS, Job
from ibnn.lab.splits import Splits
from ibnn.likelihood import Gaussian
from ibnn.nets.dense import Affine
from ibnn.nets.own import make_own, takes
from ibnn.normal import generators_restored, seed_generators
from ibnn.training.trainable import Trainable

State = dict[str, Tensor]


def make_method(job: Job, classes: int, start: State | None = None, units: Units | None = None) -> Trainable:
    """Returns the untrained method of a job.

    Args:
        job: Which one.
        classes: How many; 0 for a number to predict.
        start: Weights of the plain network to start from.
        units: Those of a .csv file, from `make_data` or `read_run`.
    """
    units = TABLES[job.data].units if job.data in TABLES else units
    if job.has_file and units is None:
        remedy = "Pass those of make_data(job).units."
        raise ValueError(complaint("units", f"those of the columns of {job.data}", "none", remedy))
    options: dict[str, Any] = {"seed": job.seed} if job.method == "ibnn" else {}
    if units and units.target:
        options["likelihood"] = Gaussian(init_std=units.target.noise)
    options |= job.method_options
    try:
        return METHODS[job.method].build(lambda member: _make_net(job, classes, start, member, units), **options)
    except TypeError as error:
        remedy = f"Leave out what {job.method!r} does not have."
        raise ValueError(complaint("method_options", f"those of {job.method!r}", options, remedy)) from error


def _make_net(job: Job, classes: int, start: State | None, member: int = 0, units: Units | None = None) -> nn.Module:
    """Returns the plain network of a job; one for points takes and gives their own units."""
    with generators_restored():
        seed_generators(job.seed, member)
        options = _net_options(job, units)
        net = make_own(job.net, classes or 1, options) if job.has_code else nets.make(job.net, classes or 1, **options)
    if units is not None:
        scale, target = torch.tensor(units.scale), units.target
        back = [Affine(target.scale, target.centre)] if target else []
        net = nn.Sequential(Affine(1 / scale, -torch.tensor(units.centre) / scale), net, *back)
    if start is not None:
        net.load_state_dict(start)
    # Convolutions on the CPU are faster with the channels last, and no slower elsewhere.
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def architecture(job: Job, classes: int, units: Units | None) -> dict[str, Any] | list[dict[str, Any]]:
    """Returns how `ibnn.load` builds the plain network of a job (see `save_pretrained`)."""
    named: dict[str, Any] = {"name": job.net, "options": {"classes": classes or 1, **_net_options(job, units)}}
    if units is None:
        return named
    return [
        {"name": "affine", "options": {"scale": part.scale.tolist(), "shift": part.shift.tolist()}}
        if isinstance(part, Affine)
        else named
        for part in _make_net(job, classes, None, units=units).children()
    ]


def _net_options(job: Job, units: Units | None) -> dict[str, Any]:
    """Returns the network's options, with the inputs of a table unless the job sets them."""
    asked = units is not None and (job.net == "mlp" or (job.has_code and takes(job.net, "inputs")))
    return ({"inputs": len(units.columns)} if asked and units else {}) | job.net_options


def start_weights(job: Job) -> State | None:
    """Reads the weights that a job starts from, if it names a file."""
    check_weights(job)
    try:
        return None if job.weights is None else safetensors.torch.load_file(job.weights)
    except safetensors.SafetensorError as error:
        got = f"{job.weights}, which is damaged or of another kind ({error})"
        raise ValueError(complaint("weights", "a safetensors file", got, "Copy or save it again.")) from None


def check_weights(job: Job) -> None:
    """Raises for a file of weights that does not exist."""
    if job.weights is not None and not Path(job.weights).is_file():
        made = f'safetensors.torch.save_file(torch.load("CHECKPOINT.pth", weights_only=True), "{job.weights}")'
        remedy = f"Make it, for example of a checkpoint of torchvision's: {made}"
        raise FileNotFoundError(complaint("weights", "a safetensors file", f"no file {job.weights}", remedy))


def check_net(job: Job, splits: Splits, start: State | None = None) -> None:
    """Passes one example through the network; raises if it does not fit the data or the weights to start from."""
    outputs = len(splits.whole.classes) or 1
    net = _make_net(job, len(splits.whole.classes), None, units=splits.units).eval()
    try:
        net.load_state_dict(start or net.state_dict())
    except RuntimeError as error:
        got = f"{job.weights} ({str(error).splitlines()[-1].strip()})"
        remedy = "Pass a file of the plain network's state_dict, or choose the network it is of."
        raise ValueError(complaint("weights", f"those of {job.net!r}", got, remedy)) from error
    x, _ = splits.train.__getitems__([0])
    try:
        with generators_restored(), torch.no_grad():
            output = net(x)
    except Exception as error:
        if (misfit := _misfit(job, x, splits.units, error)) is None:
            raise
        raise misfit from error
    shape = tuple(logits_of(output).shape)
    if job.has_code and shape != (1, outputs):
        expected = f"a network with an output of shape (1, {outputs}) for one example"
        remedy = "Give it as many outputs as its function is called with."
        raise ValueError(complaint("net", expected, f"{job.net} with an output of shape {shape}", remedy))


def _misfit(job: Job, x: Tensor, units: Units | None, error: Exception) -> ValueError | None:
    """Words an error that one example has caused; None for an error of another kind."""
    expected = f"a network for examples of shape {tuple(x.shape[1:])}, which {job.data} has"
    if job.has_code:
        got = f"{job.net}, which stops: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return ValueError(complaint("net", expected, got, "Mend it, or choose another."))
    if not isinstance(error, RuntimeError):
        return None
    got = f"{job.net!r} for {nets.input_shape(job.net, **_net_options(job, units))}"
    remedy = f'Choose another; net = "mlp" with net_options.inputs = {x.numel()} takes them.'
    return ValueError(complaint("net", expected, got, remedy))
