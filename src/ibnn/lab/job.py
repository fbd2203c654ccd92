"""One training run as data: network, data, method and recipe."""

import json
import tomllib
from hashlib import sha256
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ibnn import check, nets
from ibnn.errors import complaint, did_you_mean
from ibnn.lab import methods
from ibnn.lab.imported_net import FORM, is_import_path
from ibnn.training.recipe import Recipe, explain, to_toml


class Job(BaseModel):
    """What is trained, on what, and how.

    >>> Job(net="lenet", data="mnist", train={"epochs": 2}).full_recipe().epochs
    2
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    #: A network of `ibnn.nets`, or "package.module:function", imported from the current folder and called as
    #: `function(outputs, **net_options)`.
    net: str
    #: Its options. An "mlp", or a function that takes `inputs`, gets those of a table by default.
    net_options: dict[str, Any] = {}
    #: A data set of `ibnn.data`, a folder of images, a table of points ("toy-regression", "two-moons"), or a .csv file,
    #: looked for in the current folder and then in the data folder.
    data: str
    target: str | None = None  #: Column of a .csv file to predict.
    #: What the target holds; guessed by default, see `ibnn.data.read_table`.
    task: Literal["classes", "numbers"] | None = None
    ignore: list[str] = []  #: Columns of a .csv file that are left out.
    test_share: float = Field(0.2, gt=0, lt=1)  #: Share of the rows of a .csv file that are kept for testing.
    #: Height and width that images of a folder are resized to; default what the network takes, 224 for one of your own.
    image_size: int | None = Field(None, ge=1)
    #: Size of a stratified subset of the training images or rows, held-out ones included; default all. For points that
    #: are drawn, how many.
    examples: int | None = Field(None, ge=1)
    valid: int = Field(0, ge=0)  #: How many of them are held out, to steer and choose by.
    augment: bool = False  #: Random crops and flips.
    method: str = "ibnn"  #: "ibnn" or a baseline: "sgd", "swa", "swag", "dropout", "vi", "ensemble".
    method_options: dict[str, Any] = {}  #: Its options, such as `components`.
    #: Changes to `train` for a plain training that comes first; the method starts from its weights.
    first: dict[str, Any] | None = None
    weights: str | None = None  #: A safetensors file of trained weights to start from instead.
    #: {"keep": share of the multiply–adds that stays}, and changes to `train` such as `epochs`: a training of the same
    #: job without this comes first, its network is thinned (`ibnn.prune`) and trained on.
    prune: dict[str, Any] | None = None
    samples: int = Field(5, ge=1)  #: Draws per component in the evaluation at the end.
    one_pass: bool = False  #: Distils the draws into a network that answers in one pass (`ibnn.distil`).
    #: p-value of novelty below which that evaluation mixes answers with the base rates; default never.
    fallback: float | None = Field(None, gt=0, lt=1)
    #: Where it is trained and evaluated, such as "cuda:1"; default: the CPU, or what accelerate launches on.
    device: str | None = None
    #: Decides initial weights, order and noise; subset and held-out rows are the same for all seeds. The only seed.
    seed: int = Field(0, ge=0)
    recipe: str | None = None  #: Name of a recipe of the library that `train` changes.
    train: dict[str, Any] = {}  #: Fields of the `Recipe`.

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            if name not in Job.model_fields:
                within = {field: f"train.{field}" for field in Recipe.model_fields}
                remedy = did_you_mean(name, [*Job.model_fields, *within.values()], within, otherwise="Leave it out.")
                raise ValueError(complaint(name, "a field of a job", repr(value), remedy))
            if name != "net_options" and isinstance(value, dict) and "seed" in value:
                remedy = f"Set seed = {value['seed']} instead (--set seed={value['seed']})."
                raise ValueError(complaint(f"{name}.seed", "absent: a job has one seed", value["seed"], remedy))
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ValueError(explain(error, type(self))) from None
        self._check()

    def _check(self) -> None:
        """Raises for fields that do not go together, and for unknown names."""
        if not self.has_code:
            check.choice("net", self.net, [*nets.names(), FORM])
        check.choice("method", self.method, methods.METHODS)
        for option in self.method_options:
            check.choice("method_options", option, methods.METHODS[self.method].options)
        alike = 'the method is no "ensemble", whose members would stay alike'
        for names, condition, holds in (
            (("target", "task", "ignore", "test_share"), "data is a .csv file", self.has_file),
            (("prune",), 'method = "ibnn"', self.method == "ibnn"),
            (("first", "weights"), alike, self.method != "ensemble"),
        ):
            for name in names:
                value = getattr(self, name)
                if not holds and value != type(self).model_fields[name].default:
                    raise ValueError(complaint(name, f"absent unless {condition}", repr(value), "Leave it out."))
        if self.has_file and self.target is None:
            raise ValueError(complaint("target", f"the column of {self.data} to predict", "none", "Set target."))
        if self.prune is not None:
            check.share("prune.keep", self.prune.get("keep"), remedy="Pass 0.5 for half of the multiply–adds.")
        self.full_recipe()  # checks `train`
        self.before()  # checks `first`

    @property
    def has_file(self) -> bool:
        """Whether the data are a .csv file."""
        return self.data.lower().endswith(".csv")

    @property
    def has_code(self) -> bool:
        """Whether the network is code of the user's."""
        return is_import_path(self.net)

    def full_recipe(self) -> Recipe:
        """Returns the recipe that `fit` trains by; that of a thinned network has the changes in `prune`."""
        base = Recipe.named(self.recipe) if self.recipe else Recipe()
        recipe = _changed(base, {"seed": self.seed} | self.train, "train")
        if self.prune is None:
            return recipe
        changes = {name: value for name, value in self.prune.items() if name != "keep"}
        return _changed(recipe, {"beta_warmup": 0.0} | changes, "prune")

    def but(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed; tables are merged.

        >>> Job(net="lenet", data="mnist", train={"epochs": 2}).but(train={"lr": 0.1}).train
        {'epochs': 2, 'lr': 0.1}
        """
        return type(self)(**merged(self.model_dump(exclude_unset=True), changes))

    def before(self) -> "Job | None":
        """Returns the training that comes first, if there is one: of the network to prune, or of the plain one."""
        fields = self.model_dump(exclude_unset=True)
        if self.prune is not None:
            return Job(**(fields | {"prune": None, "one_pass": False}))
        if self.first is None:
            return None
        _changed(Recipe(), self.first, "first")  # errors name `first`, not the `train` of the other job
        of_method = ("method_options", "first", "fallback", "samples", "one_pass", "recipe")
        fields |= {name: type(self).model_fields[name].default for name in of_method}
        return Job(**(fields | {"method": "sgd", "train": self.first}))

    @property
    def key(self) -> str:
        """A short hash of the fields that differ from their defaults."""
        return short_hash(self.model_dump(exclude_defaults=True))

    @classmethod
    def from_toml(cls, text: str) -> "Job":
        """Reads what `to_toml` returned, or a job file's text."""
        return cls(**tomllib.loads(text))

    def to_toml(self) -> str:
        """Returns the fields that are set; `from_toml` gives back an equal job."""
        return to_toml(self.model_dump(exclude_unset=True))


def _changed(recipe: Recipe, changes: dict[str, Any], table: str) -> Recipe:
    """Returns a recipe with the changes in a table of the job, which errors name."""
    try:
        return recipe.but(**{k: tuple(v) if isinstance(v, list) else v for k, v in changes.items()})
    except ValueError as error:
        if isinstance(error.__context__, ValidationError):  # worded for a recipe that stands alone
            raise ValueError(explain(error.__context__, Recipe, table)) from None
        raise


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns a dict with changes; where both have a dict, these are merged too."""
    both = {k: merged(base[k], v) for k, v in changes.items() if isinstance(v, dict) and isinstance(base.get(k), dict)}
    return base | changes | both


def short_hash(fields: dict[str, Any]) -> str:
    """Returns 12 hexadecimal digits of the SHA-256 of some plain data."""
    return sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]
