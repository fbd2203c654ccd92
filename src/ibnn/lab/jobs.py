"""JOBS: one training run as data: which network, data, method and recipe. Run it, and read its folder back."""

import json
import logging
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Self

import safetensors
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from ibnn import nets
from ibnn.baselines import SWAG, Ensemble, MCDropout, MeanField, Plain
from ibnn.convert import convert
from ibnn.data import (
    TABLES,
    DataSet,
    Images,
    OwnTable,
    Points,
    Table,
    Units,
    hold_out,
    load,
    names,
    read_table,
    subset,
)
from ibnn.data.sets import data_folder as place_of_data
from ibnn.errors import complaint, nearest
from ibnn.files.atomic import read_toml
from ibnn.inputs import logits_of
from ibnn.lab.evaluation import evaluate
from ibnn.lab.provenance import provenance
from ibnn.lab.runs import ANSWERS, JOB, MODEL, RESULT, TABLE, RunFolder
from ibnn.likelihood import Gaussian, Likelihood
from ibnn.nets.dense import Affine
from ibnn.nets.own import FORM, is_own, make_own, takes
from ibnn.network import NUMBERS
from ibnn.normal import generators_restored, seed_generators
from ibnn.training.history import History
from ibnn.training.loop import fit
from ibnn.training.recipe import Recipe, explain, to_toml
from ibnn.training.trainable import Trainable

log = logging.getLogger("ibnn")

Make = Callable[[int], nn.Module]  # of a member's number

METHODS: dict[str, Callable[..., Trainable]] = {
    "sgd": lambda make, **options: Plain(make(0), **options),
    "swa": lambda make, **options: Plain(make(0), **options),  # with `swa` in its recipe
    "swag": lambda make, **options: SWAG(make(0), **options),
    "dropout": lambda make, **options: MCDropout(make(0), **options),
    "vi": lambda make, **options: MeanField(make(0), **options),
    "ensemble": lambda make, members=4, **options: Ensemble([make(m) for m in range(members)], **options),
    "ibnn": lambda make, **options: convert(make(0), copy=False, **options),
}


SYNONYMS = {  # what users of other libraries call fields, methods and options
    word: name
    for name, words in {
        "data": "dataset data_set",
        "net": "model network architecture arch backbone",
        "net_options": "model_options network_options net_kwargs model_kwargs",
        "method": "algorithm inference",
        "valid": "validation val n_valid held_out",
        "examples": "n_train subset rows",
        "augment": "augmentation augmentations",
        "weights": "checkpoint pretrained",
        "samples": "n_samples num_samples draws",
        "seed": "random_state random_seed",
        "train": "training fit",
        "train.lr": "learning_rate",
        "train.epochs": "n_epochs num_epochs max_epochs",
        "train.steps": "max_steps iterations",
        "train.batch_size": "batch batchsize",
        "train.optimiser": "optimizer",
        "method_options.components": "components n_components num_components",
        "method_options.members": "members n_members",
        "method_options.rate": "dropout_rate drop_rate dropout",
        "net_options.hidden": "hidden hidden_size",
        "net_options.layers": "layers num_layers",
        "net_options.width": "width",
    }.items()
    for word in words.split()
}
METHOD_SYNONYMS = {"plain": "sgd", "map": "sgd", "mc_dropout": "dropout", "mcdropout": "dropout", "bnn": "vi"}
METHOD_SYNONYMS |= {"mean_field": "vi", "meanfield": "vi", "deep_ensemble": "ensemble", "deep_ensembles": "ensemble"}


class Job(BaseModel):
    """What is trained, on what, and how; reads and writes TOML.

    Attributes:
        net: Name of a network of `ibnn.nets`, or "package.module:function" of the current folder, which is imported and
            called as `function(outputs, **net_options)`.
        net_options: Its options; the `inputs` of an "mlp", or of a function that takes them, are those of a table.
        data: Name of a data set of `ibnn.data`, of a folder of images, or of a table of points: "toy-regression",
            "two-moons"; or a .csv file, looked for in the current folder and then in the data folder.
        target: Of a .csv file, the column to predict.
        task: What it is: "classes" or "numbers"; default what it looks like, see `ibnn.data.read_table`.
        ignore: Columns of a .csv file that are left out.
        test_share: Share of the rows of a .csv file that are for testing.
        image_size: Height and width that the images of a folder are brought to; default what the network takes, and 224
            for one of your own.
        examples: A stratified subset of so many training images or rows, held-out ones included; None for all. Of
            points that are made, how many.
        valid: Images or points held out of them, to steer and choose by.
        augment: Random crops and flips.
        method: "ibnn" or a baseline: "sgd", "swa", "swag", "dropout", "vi", "ensemble".
        method_options: Its options, such as `components`.
        first: Changes to `train` for a plain training that comes first; its weights are where the method starts.
        weights: A safetensors file of trained weights to start from instead.
        samples: Draws per component in the evaluation at the end.
        seed: Decides initial weights, order and noise; subset and held-out images are the same for all seeds. It is the
            only one: `train`, `first` and `method_options` have none.
        recipe: Name of a recipe of the library that `train` changes.
        train: Fields of the `Recipe`.

    >>> Job(net="lenet", data="mnist", train={"epochs": 2}).full_recipe().epochs
    2
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    net: str
    net_options: dict[str, Any] = {}
    data: str
    target: str | None = None
    task: Literal["classes", "numbers"] | None = None
    ignore: list[str] = []
    test_share: float = Field(0.2, gt=0, lt=1)
    image_size: int | None = Field(None, ge=1)
    examples: int | None = Field(None, ge=1)
    valid: int = Field(0, ge=0)
    augment: bool = False
    method: str = "ibnn"
    method_options: dict[str, Any] = {}
    first: dict[str, Any] | None = None
    weights: str | None = None
    samples: int = Field(5, ge=1)
    seed: int = Field(0, ge=0)
    recipe: str | None = None
    train: dict[str, Any] = {}

    def __init__(self, **fields: Any) -> None:
        _check_names(fields)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ValueError(explain(error, type(self))) from None
        for field, known, more in (("net", nets.names(), f", or {FORM}"), ("method", list(METHODS), "")):
            if getattr(self, field) not in known and not (more and is_own(getattr(self, field))):
                near = nearest(getattr(self, field), known, METHOD_SYNONYMS)
                expected = f"one of {', '.join(known)}{more}"
                raise ValueError(complaint(field, expected, repr(getattr(self, field)), f"Did you mean {near!r}?"))
        self._check_table()
        _check_plain("net_options", self.net_options)
        for field in ("first", "weights"):
            if self.method == "ensemble" and getattr(self, field) is not None:
                got = "a start that all members would share, so that they stay alike"
                remedy = "Leave it out: members start apart."
                raise ValueError(complaint(field, 'absent where method = "ensemble"', got, remedy))
        self.full_recipe()  # complains before anything is made
        self.before()

    def _check_table(self) -> None:
        """Complains of a table without a target, and of a target without a table."""
        if self.has_file and self.target is None:
            raise ValueError(complaint("target", f"the column of {self.data} to predict", "none", "Set target."))
        given = [name for name in _OF_TABLES if getattr(self, name) != type(self).model_fields[name].default]
        if given and not self.has_file:
            expected = f"absent unless data is a .csv file, which {self.data!r} is not"
            raise ValueError(complaint(given[0], expected, repr(getattr(self, given[0])), "Leave it out."))

    @property
    def has_file(self) -> bool:
        """Whether the data are a table of your own."""
        return self.data.lower().endswith(".csv")

    @property
    def has_code(self) -> bool:
        """Whether the network is one of your own."""
        return is_own(self.net)

    def full_recipe(self) -> Recipe:
        """How `fit` trains it."""
        return self._recipe(self.recipe, "train")

    def _recipe(self, base: str | None, table: str) -> Recipe:
        """That of the fields in a table, on top of a recipe of the library."""
        fields = {"seed": self.seed, **_tuples(getattr(self, table))}
        try:
            return (Recipe.named(base) if base else Recipe()).but(**fields)
        except ValueError as error:
            if isinstance(error.__context__, ValidationError):  # worded for a recipe that stands alone
                raise ValueError(explain(error.__context__, Recipe, table)) from None
            raise

    def but(self, **changes: Any) -> Self:
        """A copy with some fields changed; tables are merged.

        >>> Job(net="lenet", data="mnist", train={"epochs": 2}).but(train={"lr": 0.1}).train
        {'epochs': 2, 'lr': 0.1}
        """
        return type(self)(**merged(self.model_dump(exclude_unset=True), changes))

    def before(self) -> "Job | None":
        """The plain training that comes first, if there is one."""
        if self.first is None:
            return None
        self._recipe(None, "first")  # complains of what is called so
        fields = {"method": "sgd", "method_options": {}, "first": None, "recipe": None, "train": self.first}
        return Job(**(self.model_dump(exclude_unset=True) | fields))

    @property
    def key(self) -> str:
        """A short hash of all fields, but for those of own tables and images that are not used."""
        defaults = {name: type(self).model_fields[name].default for name in (*_OF_TABLES, "image_size")}
        fields = {name: value for name, value in self.model_dump().items() if defaults.get(name, ...) != value}
        return sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]

    @classmethod
    def from_toml(cls, source: str | Path) -> "Job":
        """Reads a TOML file (a Path) or text."""
        return cls(**(read_toml(source) if isinstance(source, Path) else tomllib.loads(source)))

    def to_toml(self) -> str:
        """All fields that are set; `from_toml` gives back an equal job."""
        return to_toml(self.model_dump(exclude_unset=True))


def meanings() -> dict[str, str]:
    """Every word for a field of a job, and the field: its own name, one of the recipe in `train`, or a synonym.

    >>> [meanings()[word] for word in ("net", "lr", "dataset", "learning_rate")]
    ['net', 'train.lr', 'data', 'train.lr']
    """
    return (
        {name: f"train.{name}" for name in Recipe.model_fields} | SYNONYMS | {name: name for name in Job.model_fields}
    )


def _check_names(fields: dict[str, Any]) -> None:
    """Raises for a field that a job does not have, and for a seed in the wrong place."""
    for name, value in fields.items():
        if name not in Job.model_fields:
            near = nearest(name, meanings().values(), meanings())
            raise ValueError(complaint(name, "a field of a job", repr(value), f"Did you mean {near!r}?"))
    for table in ("train", "first", "method_options"):
        if isinstance(given := fields.get(table), dict) and "seed" in given:
            expected = f"absent: the seed of a job also decides its first weights and stands outside {table}"
            remedy = f"Set seed = {given['seed']} instead (--set seed={given['seed']})."
            raise ValueError(complaint(f"{table}.seed", expected, given["seed"], remedy))


_OF_TABLES = ("target", "task", "ignore", "test_share")  # fields of a job


def _check_plain(name: str, value: Any) -> None:
    """Complains of options that a job file cannot hold: dates, NaN, tables in lists."""
    if isinstance(value, dict):
        for key, entry in value.items():
            _check_plain(f"{name}.{key}", entry)
        return
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, str | int | float) or (isinstance(entry, float) and not math.isfinite(entry)):
            expected = "text, a finite number, true or false, or a list of these"
            raise ValueError(complaint(name, expected, repr(entry), "Pass it as one of these."))


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A dict with changes; where both have a dict, that is merged too.

    >>> merged({"a": 1, "b": {"c": 2}}, {"b": {"d": 3}})
    {'a': 1, 'b': {'c': 2, 'd': 3}}
    """
    both = {k: merged(base[k], v) for k, v in changes.items() if isinstance(v, dict) and isinstance(base.get(k), dict)}
    return base | changes | both


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


# --------------------------------------------------------------------------------------------------------- its parts


@dataclass(frozen=True)
class Splits:
    """The data of a job: what is trained on, held-out labels to choose by, and the set with its test part.

    Of points also their `units`.
    """

    train: Images | Points
    valid: Images | Points | None
    whole: DataSet | Table | OwnTable
    units: Units | None = None


def make_data(job: Job, folder: str | Path | None = None, units: Units | None = None) -> Splits:
    """The splits of a job, the same for all seeds.

    Args:
        job: Whose data.
        folder: Where data sets are; see `ibnn.data.load`.
        units: Those of a finished run on a table of your own, which must not have changed since.
    """
    if job.augment and (job.data in TABLES or job.has_file):
        raise ValueError(complaint("augment", "false for points", "true", "Leave it out."))
    if job.data in TABLES:
        return _points(job, TABLES[job.data])
    check_data(job.data, folder)
    if job.has_file:
        return _rows_of_file(job, folder, units)
    whole = load(job.data, folder, size=_side(job))
    train, held_out = whole.train, None
    if job.examples is not None:
        train = subset(train, job.examples, seed=0)
    if job.valid:
        train, held_out = hold_out(train, job.valid, seed=0)
    images = Images(train, mean=whole.mean, std=whole.std, augment=job.augment, flip=whole.flip)
    return Splits(images, Images(held_out, mean=whole.mean, std=whole.std) if held_out else None, whole)


def _points(job: Job, table: Table) -> Splits:
    """Points are in random order: the last ones are held out."""
    drawn = table.draw(job.examples)
    if job.valid >= len(drawn):
        raise ValueError(complaint("valid", f"below the {len(drawn)} points", job.valid, "Pass a larger examples."))
    cut = len(drawn) - job.valid
    train, held_out = (Points(drawn.x[part], drawn.y[part]) for part in (slice(cut), slice(cut, None)))
    return Splits(train, held_out if job.valid else None, table, table.units)


def _rows_of_file(job: Job, folder: str | Path | None, units: Units | None) -> Splits:
    assert job.target is not None, "checked"
    table = read_table(
        _file(job.data, folder),
        job.target,
        name=job.data,
        task=job.task,
        ignore=job.ignore,
        test_share=job.test_share,
        sha256=units.sha256 if units else None,
    )
    train, held_out = table.split(job.examples, job.valid)
    return Splits(train, held_out, table, units or table.units(train))


def _file(name: str, folder: str | Path | None) -> Path:
    """A .csv file, of the current folder or else of the data folder."""
    return next((path for path in (Path(name), place_of_data(folder) / name) if path.is_file()), Path(name))


def check_data(name: str, folder: str | Path | None = None) -> None:
    """Complains of a data set that is neither known, nor a folder of images or a table that is there."""
    place = place_of_data(folder) / name
    if name.lower().endswith(".csv"):
        if not _file(name, folder).is_file():
            remedy = "Run it from the folder of the table, or name its folder by --data or IBNN_DATA."
            raise FileNotFoundError(complaint("data", "a table", f"neither {Path.cwd() / name} nor {place}", remedy))
        return
    if name not in (*names(), *TABLES) and not (place / "train").is_dir():
        where = f"{place}/train/CLASS/*.jpg and {place}/val/CLASS/*.jpg (or .png)"
        remedy = f"Put images of your own into {where}, or name the folder above by --data or IBNN_DATA."
        expected = f"the name of a set, {', '.join((*names(), *TABLES))}, of a folder of images, or of a .csv file"
        raise FileNotFoundError(complaint("data", expected, repr(name), remedy))


def _side(job: Job) -> int:
    """Height and width that the images of a folder, which have 3 channels, are brought to."""
    if job.image_size is not None or job.has_code:
        return job.image_size or 224
    shape = nets.input_shape(job.net, **job.net_options)
    if len(shape) > 1 or job.data in names():
        return shape[-1]
    side = math.isqrt(shape[0] // 3)
    if 3 * side**2 != shape[0]:
        remedy = "Pass 3072 for images of 32 × 32."
        raise ValueError(complaint("net_options.inputs", "3 · side² for a folder of images", shape[0], remedy))
    return side


def _make_net(
    job: Job, classes: int, start: dict[str, Tensor] | None, member: int = 0, units: Units | None = None
) -> nn.Module:
    """The plain network of a job; one for points takes and gives their own units."""
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


def _net_options(job: Job, units: Units | None) -> dict[str, Any]:
    """With the inputs of a table, where it says nothing of them."""
    asked = units is not None and (job.net == "mlp" or (job.has_code and takes(job.net, "inputs")))
    return ({"inputs": len(units.columns)} if asked and units else {}) | job.net_options


def make_method(
    job: Job, classes: int, start: dict[str, Tensor] | None = None, units: Units | None = None
) -> Trainable:
    """The untrained method of a job.

    Args:
        job: Which one.
        classes: How many; 0 for a number to predict.
        start: Weights of the plain network to start from.
        units: Those of a table of your own, from `make_data` or `read_run`.
    """
    units = TABLES[job.data].units if job.data in TABLES else units
    if job.has_file and units is None:
        remedy = "Pass those of make_data(job).units."
        raise ValueError(complaint("units", f"those of the columns of {job.data}", "none", remedy))

    def make(member: int) -> nn.Module:
        return _make_net(job, classes, start, member, units)

    options = _likelihood(units) | job.method_options
    if job.method == "ibnn":
        options.setdefault("seed", job.seed)
    try:
        return METHODS[job.method](make, **options)
    except TypeError as error:
        remedy = f"Leave out what {job.method!r} does not have."
        raise ValueError(complaint("method_options", f"those of {job.method!r}", options, remedy)) from error


def _likelihood(units: Units | None) -> dict[str, Likelihood]:
    """The option of a method that says so, where the targets are no classes."""
    return {"likelihood": Gaussian(init_std=units.target.noise)} if units and units.target else {}


# ------------------------------------------------------------------------------------------------------ running it


def run(
    job: Job,
    folder: Path,
    *,
    data_folder: str | Path | None = None,
    splits: Splits | None = None,
    first_folder: Path | None = None,
    quiet: bool = False,
    held: bool = False,
) -> dict[str, Any]:
    """Trains, evaluates once on the test set, and writes the run folder; goes on where it was stopped.

    Args:
        job: What to run.
        folder: The run folder; if another process is at it, that one finishes first.
        data_folder: Where the data sets are; default as `ibnn.data.load`.
        splits: The data, if they are there already.
        first_folder: The run folder of the plain training that comes first; default one next to `folder`, named by the
            key of that job, so that runs share it.
        quiet: Shows nothing.
        held: Whether the caller holds the lock of the folder (`ibnn.runs.RunFolder.lock`).

    Returns:
        The content of result.json; if it was there already, nothing is run.
    """
    home = RunFolder(Path(folder))
    if (found := finished(job, home)) is not None:  # before the lock: the folder may be read-only
        return found
    if not held:
        with home.lock(note=None if quiet else log.warning):
            return run(
                job,
                home.path,
                data_folder=data_folder,
                splits=splits,
                first_folder=first_folder,
                quiet=quiet,
                held=True,
            )
    splits, model = _made(job, data_folder, splits)
    if splits.units is not None and splits.units.sha256 is not None:
        _keep_units(splits.units, home)
    home.write(JOB, job.to_toml().encode())
    before, spent = job.before(), {}
    if before is not None:
        place = first_folder or home.path.parent / before.key
        spent = run(before, place, data_folder=data_folder, splits=splits, quiet=quiet)["costs"]
        start = _net_of(RunFolder(place).tensors(MODEL))
        model = make_method(job, len(splits.whole.classes), start, splits.units)
    history = fit(model, splits.train, splits.valid, recipe=job.full_recipe(), run_dir=home.path, quiet=quiet)
    home.write_tensors(MODEL, model.state_dict())
    measured = evaluate(model, splits.whole, splits.valid, samples=job.samples, data_folder=data_folder)
    home.write_tensors(ANSWERS, measured.answers)
    result = {"name": f"{job.method} {job.net} {job.data} seed {job.seed}", "job": job.model_dump(exclude_unset=True)}
    result |= measured.result | {"costs": costs(job, model, history, spent), "diagnosis": history.summary}
    result |= {"training": _training(history), "classes": list(splits.whole.classes), "provenance": provenance()}
    if job.has_code:
        shape = list(splits.train[0][0].shape)
        result["probe"] = {"shape": shape, "outputs": _probed(model, shape, splits.units)}
    return home.finish(result)


def check(job: Job, data_folder: str | Path | None = None) -> Splits:
    """Returns the data of a job; raises if the job cannot run with them."""
    return _made(job, data_folder, None)[0]


def _made(job: Job, data_folder: str | Path | None, splits: Splits | None) -> tuple[Splits, Trainable]:
    """The data, and the method before any training; what cannot run raises here."""
    splits = splits or make_data(job, data_folder)
    start = _weights(job)
    check_net(job, splits, start)
    return splits, make_method(job, len(splits.whole.classes), start, splits.units)


def finished(job: Job, home: RunFolder) -> dict[str, Any] | None:
    """The result of a folder where this job has finished; raises for one of another job."""
    if not home.begun:
        return None
    if (saved := job_of(home)) != job:
        got = f"{home.path}, one of another job ({saved.net}, {saved.data}, {saved.method}, seed {saved.seed})"
        raise ValueError(complaint("folder", "a new one, or one of this job", got, "Choose another folder."))
    return home.result if (home.path / RESULT).is_file() else None


def job_of(home: RunFolder) -> Job:
    """The job of a run folder."""
    fields = home.job()
    try:
        return Job(**fields)
    except ValueError as error:
        raise home.damaged(JOB, "a job", f"one that is none ({error})") from None


def _weights(job: Job) -> dict[str, Tensor] | None:
    """Those of a file to begin with."""
    check_weights(job)
    try:
        return None if job.weights is None else safetensors.torch.load_file(job.weights)
    except safetensors.SafetensorError as error:
        got = f"{job.weights}, which is damaged or of another kind ({error})"
        raise ValueError(complaint("weights", "a safetensors file", got, "Copy or save it again.")) from None


def check_weights(job: Job) -> None:
    """Complains of a file of weights that is not there."""
    if job.weights is not None and not Path(job.weights).is_file():
        made = f'safetensors.torch.save_file(torch.load("CHECKPOINT.pth", weights_only=True), "{job.weights}")'
        remedy = f"Make it, for example of a checkpoint of torchvision's: {made}"
        raise FileNotFoundError(complaint("weights", "a safetensors file", f"no file {job.weights}", remedy))


def check_net(job: Job, splits: Splits, start: dict[str, Tensor] | None = None) -> None:
    """Passes one example through the network; complains where it does not fit the data or the weights to start from."""
    outputs = len(splits.whole.classes) or 1
    net = _make_net(job, len(splits.whole.classes), None, units=splits.units).eval()
    try:
        net.load_state_dict(start or net.state_dict())
    except RuntimeError as error:
        got = f"{job.weights} ({str(error).splitlines()[-1].strip()})"
        remedy = "Pass a file of the plain network's state_dict, or choose the network it is of."
        raise ValueError(complaint("weights", f"those of {job.net!r}", got, remedy)) from error
    with generators_restored(), torch.no_grad():
        x, _ = splits.train.__getitems__([0])
        expected = f"a network for examples of shape {tuple(x.shape[1:])}, which {job.data} has"
        try:
            output = net(x)
        except Exception as error:
            if job.has_code:
                got = f"{job.net}, which stops: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                raise ValueError(complaint("net", expected, got, "Mend it, or choose another.")) from error
            if not isinstance(error, RuntimeError):
                raise
            got = f"{job.net!r} for {nets.input_shape(job.net, **_net_options(job, splits.units))}"
            remedy = f'Choose another; net = "mlp" with net_options.inputs = {x.numel()} takes them.'
            raise ValueError(complaint("net", expected, got, remedy)) from error
    shape = tuple(logits_of(output).shape)
    if job.has_code and shape != (1, outputs):
        got = f"{job.net} with an output of shape {shape}"
        remedy = "Give it as many outputs as its function is called with."
        raise ValueError(
            complaint("net", f"a network with an output of shape (1, {outputs}) for one example", got, remedy)
        )


def _keep_units(units: Units, home: RunFolder) -> None:
    """Writes the units of a table to the run folder; complains if the run was begun with another table."""
    if (home.path / TABLE).exists() and _read_units(home).sha256 != units.sha256:
        got = f"{home.path}, which was begun before the table changed"
        raise ValueError(complaint("folder", "a new one, or one of this table", got, "Start anew: --fresh."))
    home.write(TABLE, f"{units.to_json()}\n".encode())


def _read_units(home: RunFolder) -> Units:
    home.require([TABLE])
    try:
        return Units.from_json(home.text(TABLE))
    except ValueError as error:
        raise home.damaged(TABLE, "what `ibnn train` wrote of the table", error) from error


@torch.no_grad()
def _probed(model: Trainable, shape: list[int], units: Units | None) -> list[float]:
    """What a trained method says of made-up examples: other code of a network would say something else."""
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)) if units is None else units.made_up(4)
    device = next(model.parameters()).device
    found: list[float] = model.eval().draw_logits(x.to(device), 1, 0).mean(0).flatten().tolist()
    return found


def _net_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("net."): value for name, value in state.items() if name.startswith("net.")}


def _training(history: History) -> dict[str, Any]:
    """How training went: the ends of it, and the lowest held-out NLL on the way."""
    last = {name: history.rows[-1][name] for name in ("epoch", "nll", "kl", "valid_nll") if name in history.rows[-1]}
    valid = [row["valid_nll"] for row in history.rows if "valid_nll" in row]
    strength = {"prior_std": history.looks[-1]["prior_std"]} if history.looks else {}
    return last | ({"lowest_valid_nll": min(valid)} if valid else {}) | strength


COSTS = {  # in words
    "train_seconds": "seconds of training",
    "rows": "rows trained on",
    "steering_rows": "held-out forward passes for steering",
    "parameters": "parameters",
    "latents": "of them latents",
    "stored": "numbers stored",
    "forwards": "forward passes per prediction",
}


def costs(job: Job, model: Trainable, history: History, first: dict[str, Any] | None = None) -> dict[str, Any]:
    """What it took, and what an answer takes.

    Args:
        job: What was run.
        model: What came of it.
        history: Of its training.
        first: Costs of the plain training that came first.

    Returns:
        Seconds of training; rows that went through a network in training, and to steer it by held-out labels;
        parameters, and how many of them are latents; numbers that are stored for predictions; forward passes per
        prediction.
    """
    first = first or {"train_seconds": 0.0, "rows": 0}
    trainings = [history.first, history] if history.first else [history]
    copies = {"sgd": 1, "swa": 1, "swag": 1, "ensemble": model.components}.get(job.method, job.full_recipe().samples)
    latents = sum(p.numel() for name, p in model.named_parameters() if ".latent." in name or name.startswith("rho."))
    repeated = model.mean.numel() if isinstance(model, SWAG) else 0  # which the network has, too
    numbers = [value for name, value in model.state_dict().items() if name not in NUMBERS]
    one = job.method in ("sgd", "swa", "ensemble")  # one answer a component
    return {
        "train_seconds": round(first["train_seconds"] + sum(training.seconds for training in trainings), 3),
        "rows": first["rows"] + copies * sum(_rows(job, training) for training in trainings),
        "steering_rows": sum(training.looked for training in trainings),
        "parameters": sum(p.numel() for p in model.parameters()),
        "latents": latents,
        "stored": sum(value.numel() for value in numbers if value.is_floating_point()) - repeated,
        "forwards": model.components * (1 if one else job.samples),
    }


def _rows(job: Job, history: History) -> int:
    """Examples that were trained on, each as often as it was."""
    recipe, last = job.full_recipe(), history.rows[-1]
    batch = min(recipe.batch_size, history.examples)
    return int(last["step"] * batch if recipe.steps else last["epoch"] * history.examples)


@dataclass(frozen=True)
class Run:
    """A finished run, read back; of points also their `units`."""

    job: Job
    model: Trainable
    result: dict[str, Any]
    units: Units | None = None


def read_run(folder: str | Path, *, trust_code: bool = False) -> Run:
    """The job, the trained method in eval mode, and the result of a run folder.

    Args:
        folder: The run folder.
        trust_code: Imports a network that the run names as "package.module:function" from the current folder, and so
            runs code; without it such a run is refused.
    """
    home = RunFolder(Path(folder))
    home.require([JOB, MODEL, RESULT])
    job, result = job_of(home), home.result
    if job.has_code and not trust_code:
        got = f"one whose network is code, {job.net}"
        remedy = "If you trust that module of the current folder, pass --trust-code (trust_code=True) to import it."
        raise ValueError(complaint("folder", "a run of a network of the library", got, remedy))
    units = _read_units(home) if job.has_file else TABLES[job.data].units if job.data in TABLES else None
    model = make_method(job, len(result["classes"]), units=units)
    try:
        model.load_state_dict(_with_prior(home.tensors(MODEL), result))
    except RuntimeError as error:
        got = f"other ones ({str(error).splitlines()[-1].strip()})"
        if job.has_code:
            raise _other_code(job, got) from error
        raise home.damaged(MODEL, f"weights of the {job.net!r} in {JOB}", got) from error
    if job.has_code:
        _check_code(job, model, result.get("probe", {}), units)
    return Run(job, model.eval(), result, units)


def _with_prior(state: dict[str, Tensor], result: dict[str, Any]) -> dict[str, Tensor]:
    """Adds the steered `prior_std` to a state from before it was part of states."""
    found = result["training"].get("prior_std")
    return ({} if found is None else {"prior_std": torch.tensor(found, dtype=torch.float64)}) | state


def _check_code(job: Job, model: Trainable, probe: dict[str, Any], units: Units | None) -> None:
    """Raises if the network's code does not give the answers that it gave at the end of training."""
    stored = torch.tensor(probe.get("outputs", []))
    found = torch.tensor(_probed(model, probe.get("shape", []), units))
    rounding = 1e-3 * stored.abs().amax() if len(stored) else 0
    if found.shape != stored.shape or not bool(((found - stored).abs() <= rounding).all()):
        raise _other_code(job, "the same weights answer otherwise")


def _other_code(job: Job, got: str) -> ValueError:
    remedy = "Bring the code of that time back, or train anew."
    return ValueError(complaint("net", f"{job.net} as it was when the run was trained", f"another ({got})", remedy))
