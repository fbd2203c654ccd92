"""Makes the parts of a job: its data, the same for all seeds, and its untrained network and method."""

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ibnn import check, data, nets
from ibnn.data.sets import data_folder
from ibnn.errors import complaint
from ibnn.generators import generators_restored, seed_generators
from ibnn.inputs import logits_of
from ibnn.lab.imported_net import find, make_net
from ibnn.lab.job import Job
from ibnn.lab.methods import METHODS
from ibnn.likelihood import Gaussian
from ibnn.nets.dense import Affine
from ibnn.one_pass import FEWEST
from ibnn.training.trainable import Trainable

State = dict[str, Tensor]
Units = data.Standardisation | None


class Splits(NamedTuple):
    """Training data, held-out data to choose by, and the whole set with its test part; of points also their units."""

    train: data.Images | data.Points
    valid: data.Images | data.Points | None
    whole: data.DataSet | data.Table | data.FileTable
    units: Units = None

    @property
    def unaugmented(self) -> data.Images | data.Points:
        """The training data without random crops and flips."""
        train = self.train
        return data.Images(train.data, mean=train.mean, std=train.std) if isinstance(train, data.Images) else train


def make_data(job: Job, folder: str | Path | None = None, units: Units = None) -> Splits:
    """Returns the splits of a job; `units` are those of a finished run on a .csv file, which must not have changed."""
    check_data(job.data, folder)
    if job.augment and (job.data in data.TABLES or job.has_file):
        raise ValueError(complaint("augment", "false for points", "true", "Leave it out."))
    if job.data in data.TABLES:
        drawn = data.TABLES[job.data]
        return Splits(*drawn.split(job.examples, job.valid), drawn, drawn.units)
    if job.has_file:
        options: dict[str, Any] = {"task": job.task, "ignore": job.ignore, "test_share": job.test_share}
        options |= {"name": job.data, "sha256": units.sha256 if units else None}
        table = data.read_table(_file(job.data, folder), str(job.target), **options)
        points, held_points = table.split(job.examples, job.valid)
        return Splits(points, held_points, table, units or table.units(points))
    shape = () if job.has_code else nets.input_shape(job.net, **job.net_options)
    whole = data.load(job.data, folder, size=job.image_size or (shape[-1] if len(shape) == 3 else 224))
    train, held_out = whole.train, None
    if job.examples is not None:
        train = data.subset(train, job.examples, seed=0)
    if job.valid:
        train, held_out = data.hold_out(train, job.valid, seed=0)
    images = data.Images(train, mean=whole.mean, std=whole.std, augment=job.augment, flip=whole.flip)
    return Splits(images, data.Images(held_out, mean=whole.mean, std=whole.std) if held_out else None, whole)


def _file(name: str, folder: str | Path | None) -> Path:
    """Returns the path of a .csv file in the current folder or else in the data folder."""
    return Path(name) if Path(name).is_file() else data_folder(folder) / name


def check_data(name: str, folder: str | Path | None = None) -> None:
    """Raises for data that are neither a known set, nor a folder of images or a table that exists."""
    place, known = data_folder(folder) / name, (*data.names(), *data.TABLES)
    if name.lower().endswith(".csv"):
        if not _file(name, folder).is_file():
            remedy = "Run it from the folder of the table, or name its folder by --data or IBNN_DATA."
            raise FileNotFoundError(complaint("data", "a table", f"neither {Path.cwd() / name} nor {place}", remedy))
    elif name not in known and not (place / "train").is_dir():
        where = f"{place}/train/CLASS/*.jpg and {place}/val/CLASS/*.jpg (or .png)"
        remedy = f"Put images of your own into {where}, or name the folder above by --data or IBNN_DATA."
        expected = f"the name of a set, {', '.join(known)}, of a folder of images, or of a .csv file"
        raise FileNotFoundError(complaint("data", expected, repr(name), remedy))


def make_method(job: Job, classes: int, start: State | None = None, units: Units = None) -> Trainable:
    """Returns the untrained method of a job, for 0 classes of a number; `start` are weights to start from."""
    units = data.TABLES[job.data].units if job.data in data.TABLES else units
    options: dict[str, Any] = {"seed": job.seed} if job.method == "ibnn" else {}
    if units and units.target:
        scale = units.target.scale
        options["likelihood"] = Gaussian(init_std=units.target.noise / scale, location=units.target.centre, scale=scale)
    options |= job.method_options
    return METHODS[job.method].build(lambda member: plain_net(job, classes, units, start, member), **options)


def plain_net(job: Job, classes: int, units: Units, start: State | None = None, member: int = 0) -> nn.Module:
    """Returns the plain network of a job; one for points takes their own units."""
    with generators_restored():
        seed_generators(job.seed, member)
        options = _net_options(job, units)
        net = make_net(job.net, classes or 1, options) if job.has_code else nets.make(job.net, classes or 1, **options)
    if units is not None:
        scale = torch.tensor(units.scale)
        net = nn.Sequential(Affine(1 / scale, -torch.tensor(units.centre) / scale), net)
    if start is not None:
        net.load_state_dict(start)
    # Convolutions on the CPU are faster with the channels last, and no slower elsewhere.
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def architecture(job: Job, splits: Splits) -> dict[str, Any] | list[dict[str, Any]] | None:
    """Returns how `ibnn.load` builds the plain network of a job (see `save_pretrained`); None for a thinned one."""
    if job.prune is not None:
        return None
    classes, units = len(splits.whole.classes), splits.units
    named: dict[str, Any] = {"name": job.net, "options": {"classes": classes or 1, **_net_options(job, units)}}
    if units is None:
        return named
    affine: Any = next(plain_net(job, classes, units).children())
    return [{"name": "affine", "options": {"scale": affine.scale.tolist(), "shift": affine.shift.tolist()}}, named]


def _net_options(job: Job, units: Units) -> dict[str, Any]:
    """Returns the network's options, with the inputs of a table unless the job sets them."""
    takes_inputs = job.net == "mlp" or (job.has_code and "inputs" in inspect.signature(find(job.net)).parameters)
    return ({"inputs": len(units.columns)} if units and takes_inputs else {}) | job.net_options


def prepare(job: Job, folder: str | Path | None = None, splits: Splits | None = None) -> tuple[Splits, Trainable]:
    """Returns the data and the untrained method; raises if the job cannot run."""
    check.device("device", job.device)
    splits = splits or make_data(job, folder)
    check_weights(job)
    try:
        start = None if job.weights is None else safetensors.torch.load_file(job.weights)
    except safetensors.SafetensorError as error:
        got = f"{job.weights}, which is damaged or of another kind ({error})"
        raise ValueError(complaint("weights", "a safetensors file", got, "Copy or save it again.")) from None
    _check_net(job, splits, start)
    method, rows = make_method(job, len(splits.whole.classes), start, splits.units), len(splits.train)
    if job.one_pass and (rows + len(splits.valid or ()) < FEWEST or not (method.random or method.components > 1)):
        expected = f"absent unless the method draws and there are {FEWEST} inputs"
        raise ValueError(complaint("one_pass", expected, f"{job.method} on {rows}", "Leave it out."))
    return splits, method


def check_weights(job: Job) -> None:
    """Raises for a file of weights that does not exist."""
    if job.weights is not None and not Path(job.weights).is_file():
        made = f'safetensors.torch.save_file(torch.load("CHECKPOINT.pth", weights_only=True), "{job.weights}")'
        remedy = f"Make it, for example of a checkpoint of torchvision's: {made}"
        raise FileNotFoundError(complaint("weights", "a safetensors file", f"no file {job.weights}", remedy))


def _check_net(job: Job, splits: Splits, start: State | None) -> None:
    """Passes one example through the network; raises if it does not fit the data or the weights to start from."""
    outputs = len(splits.whole.classes) or 1
    try:
        net = plain_net(job, len(splits.whole.classes), splits.units, start).eval()
    except RuntimeError as error:
        got = f"{job.weights} ({str(error).splitlines()[-1].strip()})"
        raise ValueError(complaint("weights", f"those of {job.net!r}", got, "Pass the plain network's.")) from error
    x, _ = splits.train.__getitems__([0])
    try:
        with generators_restored(), torch.no_grad():
            shape = tuple(logits_of(net(x)).shape)
    except Exception as error:
        expected = f"a network for examples of shape {tuple(x.shape[1:])}, which {job.data} has"
        got = f"{job.net!r}, which stops: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        remedy = f'Choose another; net = "mlp" with net_options.inputs = {x.numel()} takes them.'
        raise ValueError(complaint("net", expected, got, remedy)) from error
    if shape != (1, outputs):
        expected = f"a network with an output of shape (1, {outputs}) for one example"
        remedy = "Give it as many outputs as its function is called with."
        raise ValueError(complaint("net", expected, f"{job.net} with an output of shape {shape}", remedy))
