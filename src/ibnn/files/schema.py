"""The schema of a saved model's config.json: its keys, their kinds, and limits that no real model meets."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ibnn.convert import BiasLatents, Where
from ibnn.errors import complaint
from ibnn.mixture import KLKind
from ibnn.noise import DrawsPer

Count = Annotated[int, Field(ge=1, le=2**16)]
Positive = Annotated[float, Field(gt=0)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Limited = Annotated[float, Field(ge=-1e6, le=1e6)]
Options = dict[str, bool | Limited | str | None]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Network(_Strict):
    """How `ibnn.nets.make` builds a network."""

    name: str
    options: dict[str, Any] = {}


class Likelihood(_Strict):
    """A likelihood's class and its constructor options; None for a class of the user's own."""

    name: str
    options: Options | None = None
    heads: dict[str, "Likelihood"] | None = None


class Function(_Strict):
    """Stands for a function, which no file holds."""

    function: Literal[True]


class Shared(_Strict):
    """What every config has besides its model's description."""

    format: Literal["ibnn"]
    format_version: int
    ibnn_version: str
    latents_only: bool
    tied: dict[str, str]
    fingerprint: Digest
    sha256: Digest
    architecture: Network | list[Network] | None = None


class Latents(_Strict):
    """The description of an IBNN."""

    components: Count
    likelihood: Likelihood
    prior_std: Positive
    kl_kind: KLKind
    eval_samples: int = Field(ge=0, le=2**16)
    eval_seed: int = Field(ge=0, lt=2**63)
    gradient_scale: Positive
    draws: DrawsPer
    where: Where
    bias_latents: BiasLatents
    logits: str | Function | None
    layers: dict[str, Annotated[int, Field(ge=1)]] = Field(min_length=1)


class Method(_Strict):
    """The description of another method."""

    components: Count
    likelihood: Likelihood
    method: str
    options: Options


class Converted(Shared, Latents):
    """The config of an IBNN."""


class Baseline(Shared, Method):
    """The config of another method; an ensemble describes its members."""

    members: Annotated[list[Latents | Method], Field(min_length=2, max_length=2**10)] | None = None


def checked_architecture(architecture: Any) -> Any:
    """Returns a description of a network, or a list of them, as JSON holds it; raises if it is of another form."""
    try:
        parts = json.loads(json.dumps(architecture))
        TypeAdapter(Network | Annotated[list[Network], Field(min_length=1)]).validate_python(parts)
    except (TypeError, ValueError):
        expected, remedy = '{"name": …, "options": {…}}, or a list of these', 'Pass e.g. {"name": "lenet"}.'
        raise ValueError(complaint("architecture", expected, repr(architecture), remedy)) from None
    return parts


def check_config(config: dict[str, Any], path: Path) -> None:
    """Raises unless a config has exactly the keys that `save_pretrained` writes, with values that can be."""
    try:
        (Baseline if "method" in config else Converted).model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        key, expected = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Input should be ")
        got = repr(first["input"])[:80]
        if first["type"] in ("missing", "extra_forbidden"):
            expected, got = ("given", "none") if first["type"] == "missing" else ("no key of a config", got)
        remedy = "Copy or download the folder again."
        raise ValueError(complaint(f"{key}` of `{path}", expected, got, remedy)) from None
