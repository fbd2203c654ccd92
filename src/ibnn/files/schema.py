"""The schema of a saved model's config.json: its keys, their kinds, and limits that no real model meets."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ibnn.convert import BiasLatents, Where
from ibnn.errors import complaint
from ibnn.mixture import KLKind
from ibnn.noise import DrawsPer

_Count = Annotated[int, Field(ge=1, le=2**16)]
_Positive = Annotated[float, Field(gt=0)]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_Limited = Annotated[float, Field(ge=-1e6, le=1e6)]
_Options = dict[str, bool | _Limited | str | None]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Network(_Strict):  # as `ibnn.nets.make` takes it
    name: str
    options: dict[str, Any] = {}


class _Likelihood(_Strict):
    name: str
    options: _Options | None = None  # of the constructor; None for a class of the user's own
    heads: dict[str, "_Likelihood"] | None = None


class _Latents(_Strict):  # the description of an IBNN
    components: _Count
    likelihood: _Likelihood
    prior_std: _Positive
    kl_kind: KLKind
    eval_samples: int = Field(ge=0, le=2**16)
    eval_seed: int = Field(ge=0, lt=2**63)
    gradient_scale: _Positive
    draws: DrawsPer
    where: Where
    bias_latents: BiasLatents
    logits: str | dict[Literal["function"], Literal[True]] | None  # the dict stands for a function, which no file holds
    layers: dict[str, Annotated[int, Field(ge=1)]] = Field(min_length=1)


class _Method(_Strict):  # the description of another method
    components: _Count
    likelihood: _Likelihood
    method: str
    options: _Options


class _Shared(_Strict):  # what every config has besides its model's description
    format: Literal["ibnn"]
    format_version: int
    ibnn_version: str
    latents_only: bool
    tied: dict[str, str]
    fingerprint: _Digest
    sha256: _Digest
    architecture: _Network | list[_Network] | None = None


class _Converted(_Shared, _Latents):
    pass


class _Baseline(_Shared, _Method):
    members: Annotated[list[_Latents | _Method], Field(min_length=2, max_length=2**10)] | None = None  # of an ensemble


def checked_architecture(architecture: Any) -> Any:
    """Returns a description of a network, or a list of them, as JSON holds it; raises if it is of another form."""
    try:
        parts = json.loads(json.dumps(architecture))
        TypeAdapter(_Network | Annotated[list[_Network], Field(min_length=1)]).validate_python(parts)
    except (TypeError, ValueError):
        expected, remedy = '{"name": …, "options": {…}}, or a list of these', 'Pass e.g. {"name": "lenet"}.'
        raise ValueError(complaint("architecture", expected, repr(architecture), remedy)) from None
    return parts


def check_config(config: dict[str, Any], path: Path) -> None:
    """Raises unless a config has exactly the keys that `save_pretrained` writes, with values that can be."""
    try:
        (_Baseline if "method" in config else _Converted).model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        got = f"{'.'.join(map(str, first['loc']))} = {repr(first['input'])[:80]}: {first['msg']}"
        raise ValueError(complaint(str(path), "as save_pretrained writes it", got, "Copy the folder again.")) from None
