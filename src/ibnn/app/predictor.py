"""A predictor answers inputs of one kind, and abstains: made of a run folder, a saved model, a live one or ONNX."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ibnn import check
from ibnn.app.inputs import BATCH, Kind, Pixels, Tensors
from ibnn.data.images import shorter_side
from ibnn.data.sets import KNOWN, PHOTOGRAPHS
from ibnn.errors import complaint
from ibnn.files import model_folder
from ibnn.files.answering import named
from ibnn.files.export import ExportedFile
from ibnn.files.saving import load
from ibnn.inputs import Inputs
from ibnn.lab import jobs, parts
from ibnn.lab.evaluation import held_out_rows
from ibnn.lab.imported_net import find
from ibnn.lab.runs import RunFolder
from ibnn.likelihood import Categorical
from ibnn.monitoring.abstention import CONFIDENCE, Threshold, default_level, rows_needed, threshold
from ibnn.novelty import Reference
from ibnn.one_pass import OnePass
from ibnn.prediction import GaussianPrediction, Prediction, check_fallback, check_level, predict

SAMPLES = 5  # draws per component of a model that no job was made for
Labelled = tuple[Inputs, Tensor]


class HeldOut(NamedTuple):
    """Answers for labelled inputs that were not trained on, (N,) each."""

    total: Tensor  # entropy
    wrong: Tensor  # whether the label was wrong
    p_value: Tensor  # p-values of novelty; 1 where the model cannot tell


@dataclass(frozen=True)
class Predictor:
    """A model, the inputs that it takes, and the draws to predict by."""

    name: str
    model: Any  # an IBNN, a baseline, or an `ExportedFile`
    kind: Kind = field(default_factory=Tensors)
    classes: Sequence[str] = ()  # their names, where these are known
    target: str | None = None  # name of a number to predict
    samples: int = SAMPLES  # draws per component
    seed: int = 0  # of the draws
    fallback: float | None = None  # p-value below which answers are mixed with the base rates
    valid: Labelled | None = None  # labelled inputs that decide where to abstain
    run: jobs.Run | None = None  # what it was read from, if that is a run

    def __post_init__(self) -> None:
        """Raises for a number of draws or a fallback that the model cannot have."""
        check.integer("samples", self.samples, remedy="Pass samples=5.")
        if self.fallback is not None and not isinstance(self.model, ExportedFile):
            check_fallback(self.fallback, self.reference)

    @classmethod
    def read(
        cls,
        model: Path,
        samples: int | None = None,
        seed: int = 0,
        *,
        fallback: float | None = None,
        trust_code: bool = False,
        net: str | None = None,
        device: str | None = None,
        one_pass: bool = False,
        data: Path | None = None,
        note: Callable[[str], None] | None = None,
    ) -> Self:
        """Reads a finished run, a folder of `save_pretrained` or an exported .onnx file; options are the commands'.

        A run answers by the job's number of draws by default, others by 5. `net` makes the network of a saved model;
        with `one_pass` a run answers by its student, which is distilled from its data if there is none.
        """
        is_file, is_run = model.suffix == ".onnx" and not model.is_dir(), RunFolder(model).begun
        if not is_file and not model.is_dir():
            raise FileNotFoundError(complaint("MODEL", "a folder or .onnx file", f"no such {model}", "Check the path."))
        is_saved = not is_file and not is_run and (model / model_folder.CONFIG).is_file()
        elsewhere = None if device is None or torch.device(device).type == "cpu" else device
        fixed = {"--samples": samples, "--seed": seed or None, "--fallback": fallback, "--device": elsewhere}
        for option, value, fits, where in (
            *((name, value, not is_file, "for an .onnx file, which has its own") for name, value in fixed.items()),
            *((name, fixed[name], not one_pass, "with --one-pass") for name in ("--samples", "--seed")),
            ("--net", net, is_saved, "unless MODEL is a saved model"),
            ("--one-pass", one_pass or None, is_run, "unless MODEL is a run; pass what was distilled"),
        ):
            if value is not None and not fits:
                raise ValueError(complaint(option, f"absent {where}", value, "Leave it out."))
        if is_file:
            return cls._of_file(model)
        draws: Any = {"seed": seed, "fallback": fallback}
        if is_saved:
            made = cls._of_save(model, net, samples=samples or SAMPLES, **draws)
        else:
            run = jobs.read_run(model, trust_code=trust_code)
            made = cls._of_run(run, samples, draws)
            if one_pass:
                made = replace(made, model=run.student(data, note), samples=1)
        made.model.to(device)
        return made

    @classmethod
    def _of_run(cls, run: jobs.Run, samples: int | None, draws: dict[str, Any]) -> Self:
        data, units = run.job.data, run.units
        kind: Kind
        if units is not None:
            kind = Tensors(columns=units.columns, named=units.sha256 is not None)
        else:
            shape = tuple(run.home.answers()["shown/images"].shape[1:])
            mean, std = (KNOWN[data].mean, KNOWN[data].std) if data in KNOWN else PHOTOGRAPHS
            kind = Pixels(shape, mean, std, None if data in KNOWN else shorter_side(shape[1]))
        draws |= {"samples": samples or run.job.samples, "run": run}
        classes = tuple(map(str, run.result["classes"]))
        return cls(run.result["name"], run.model, kind, classes, run.job.target, **draws)

    @classmethod
    def _of_save(cls, folder: Path, net: str | None, **draws: Any) -> Self:
        try:
            made = None if net is None else find(net)()
        except TypeError as error:
            raise ValueError(complaint("--net", "a function without arguments", error, "Define one.")) from error
        return cls.of_model(load(folder, made), name=folder.resolve().name, **draws)

    @classmethod
    def of_model(cls, model: Any, *, name: str | None = None, classes: Sequence[str] = (), **options: Any) -> Self:
        """Makes a predictor of a converted network or a baseline, on the model's own device."""
        if not isinstance(model, nn.Module) or not hasattr(model, "each_draw"):
            remedy = "Pass what ibnn.convert returned, or a baseline of ibnn.baselines."
            raise TypeError(complaint("model", "a converted network or a baseline", type(model).__name__, remedy))
        whole = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())
        name = name or f"{type(model).__name__} of {type(getattr(model, 'net', model)).__name__}"
        return cls(name, model.eval(), Tensors(whole=whole), tuple(map(str, classes)), **options)

    @classmethod
    def _of_file(cls, path: Path) -> Self:
        model = ExportedFile(path)
        facts, shape = model.facts, model.shapes.get("x")
        known = tuple(shape) if shape is not None and all(isinstance(size, int) for size in shape) else None
        kind: Kind = Tensors(known, shape is not None and model.whole, tuple(facts.get("columns") or ()))
        if shape is not None and len(shape) == 3 and (facts.get("pixels") or facts.get("normalisation")):
            normal = {} if facts.get("pixels") else facts["normalisation"]
            kind = Pixels(tuple(shape), **normal, resize=facts.get("resize"))
        classes, name = tuple(map(str, facts.get("classes") or ())), facts.get("run") or path.name
        draws = {"samples": facts["samples"], "seed": facts["seed"], "fallback": model.fallback}
        return cls(name, model, kind, classes, facts.get("target"), **draws)

    @property
    def labels(self) -> bool:
        """Whether every answer is one of several classes."""
        return isinstance(self.model.likelihood, Categorical)

    def answer(self, inputs: Inputs) -> Prediction:
        """Predicts for inputs of the predictor's kind; the answers are on the CPU."""
        return self._answer(self.kind.prepared(inputs))

    def _answer(self, x: Inputs) -> Prediction:
        if isinstance(self.model, ExportedFile):
            return self.model.predict(x)
        draws: Any = {"samples": self.samples, "seed": self.seed, "fallback": self.fallback}
        return predict(self.model, x, batch_size=BATCH, **draws).to("cpu")

    def described(self, found: Prediction, rule: Threshold) -> list[dict[str, Any]]:
        """Returns a class, its probability and entropies; or a number, its std, 90 % interval and variances.

        They are followed by the p-value of novelty, if the model can tell it, and by whether and why to abstain.
        """
        values = named(found)
        rows: list[dict[str, Any]] = [{} for _ in range(len(found))]
        if isinstance(found, GaussianPrediction):
            low, high = found.interval(0.9)
            values = {"mean": found.mean, "std": found.std, "low": low, "high": high} | values
        elif self.labels and values["probabilities"].dim() == 2:
            probs = values.pop("probabilities")
            rows = [{"label": self.names(probs.shape[1])[number]} for number in probs.argmax(1).tolist()]
            values = {"probability": probs.amax(1)} | values
        values |= {} if found.p_value is None else {"p_value": found.p_value}
        lists = {name: (v.reshape(-1) if v[0].numel() == 1 else v).tolist() for name, v in values.items()}
        rows = [row | {name: each[i] for name, each in lists.items()} for i, row in enumerate(rows)]
        if not self.labels and found.p_value is None:  # nothing is ever withheld
            return rows
        if hasattr(found, "total"):
            why = rule.reasons(found)  # type: ignore[arg-type]
        else:  # several heads
            novel = found.novel(rule.novelty).tolist() if rule.novelty else [False] * len(rows)
            why = ["novel" if each else None for each in novel]
        return [row | {"abstain": w is not None, "withheld": w} for row, w in zip(rows, why, strict=True)]

    def names(self, count: int) -> list[str]:
        """Returns the names of the classes, or their numbers if they have none."""
        return list(self.classes) if len(self.classes) == count else [str(number) for number in range(count)]

    @property
    def reference(self) -> Reference | None:
        """What novel inputs are recognised by; None for models without reference data, and for files."""
        return getattr(self.model, "reference", None)

    @property
    def ranked(self) -> int | None:
        """How many held-out inputs p-values are ranks among; None if novel inputs are not recognised."""
        return self.reference.ranked if self.reference is not None else getattr(self.model, "ranked", None)

    def novelty_level(self, given: float | None) -> float:
        """Returns the p-value up to which inputs are withheld as novel; 0 if the model cannot tell.

        By default 0.01, or the smallest p-value that the model can give if that is larger.
        """
        if self.ranked is None:
            if given:
                remedy = "Train again with at least 50 validation examples."
                raise ValueError(complaint("novelty", "0 for a model that knows no reference data", given, remedy))
            return 0.0
        if given:
            check_level("novelty", given, self.ranked)
        return default_level(self.ranked) if given is None else given

    def rule(self, risk: float, novelty: float, held: HeldOut | None) -> tuple[Threshold, dict[str, Any] | None]:
        """Returns the rule that keeps the share of wrong answers at or below a risk, and the evidence.

        With fewer held-out inputs than the risk needs, no answer is withheld as uncertain. Answers for inputs with
        p-values up to `novelty` are withheld in any case.
        """
        if held is None or risk >= 1:  # every answer is certain enough, or nobody knows
            return Threshold(math.inf, 1.0, 0, 1.0, novelty), None
        needed, known = rows_needed(risk), held.p_value > novelty
        facts = {"risk": risk, "confidence": CONFIDENCE, "examples": len(held.total)}
        if int(known.sum()) < needed:
            found = Threshold(math.inf, 1.0, int(held.wrong[known].sum()), 1.0, novelty)
        else:
            found = threshold(held.total, held.wrong, risk, novel=~known)._replace(novelty=novelty)
        return found, facts | {"needed": needed, "known": int(known.sum())} | found._asdict()

    def notes(self, facts: dict[str, Any] | None, level: float) -> list[str]:
        """Describes where answers are withheld, and what that guarantees; `facts` and `level` are those of `rule`."""
        novel = f"p-value ≤ {level:g}" if level else ""
        off = [] if self.ranked is not None else ["Novelty detection is off: the model has no reference data."]
        if facts is None:
            return [f"Abstains where {novel}." if novel else "Never abstains.", *off]
        by = f"{facts['examples']:,} validation inputs"
        if facts["known"] < facts["needed"]:
            text = f"No answer is withheld as uncertain: a risk of {facts['risk']:g} needs {facts['needed']} held-out "
            text += f"inputs that are not novel, and {facts['known']} of the {by} are not. Hold out more rows."
        elif not facts["coverage"]:
            text = f"All abstain: by the {by}, no threshold keeps the error at or below {facts['risk']:g}."
        else:
            text = (
                f"Abstains where total > {facts['limit']:.4g}{' or ' * bool(novel)}{novel}: this answers "
                f"{facts['coverage']:.0%} of the {by}; with {facts['confidence']:.0%} confidence at most "
                f"{facts['bound']:.2%} of such answers are wrong ({facts['risk']:.2%} allowed)."
            )
        return [text, *off]

    def held_out(self, data: Path | None = None) -> HeldOut | None:
        """Returns the answers for validation inputs that a run has stored, or those of other draws, from its data.

        Of other models, those for the labelled inputs that they were given, if any; none for numbers.
        """
        if not self.labels or self.run is None:
            return self._measured(*self.valid) if self.labels and self.valid is not None else None
        job, stored = self.run.job, self.run.home.answers()
        if not job.valid:
            return None
        draws = self.samples, self.seed, self.fallback, isinstance(self.model, OnePass)
        if draws == (job.samples, 0, job.fallback, False) and "valid/total" in stored:
            return HeldOut(*(stored[f"valid/{name}"] for name in HeldOut._fields))
        with suppress(FileNotFoundError, ModuleNotFoundError):  # the data are elsewhere: nobody knows
            valid: Any = parts.make_data(job, data, self.run.units).valid
            return self._measured(*valid.__getitems__(held_out_rows(len(valid))))
        return None

    def _measured(self, x: Inputs, y: Tensor) -> HeldOut:
        answer: Any = self._answer(x)
        if answer.total.numel() != len(answer):
            got = type(answer).__name__
            raise ValueError(complaint("valid", "given for a model with one label an input", got, "Leave it out."))
        total, wrong = answer.total.flatten(), answer.labels.flatten() != y.cpu().flatten()
        return HeldOut(total, wrong, torch.ones_like(total) if answer.p_value is None else answer.p_value)


def check_limits(risk: float, novelty: float | None, false_alarm: float = 0.01, megabytes: float = 10) -> None:
    """Raises for numbers that are out of range; names are those of the command's options."""
    check.number("--risk", risk, above=0, most=1, remedy="Pass 0.05.")
    if novelty is not None:
        check.number("--novelty", novelty, least=0, below=1, remedy="Pass 0.01, or 0 for never.")
    check.share("--false-alarm", false_alarm, remedy="Pass 0.01.")
    check.number("--megabytes", megabytes, above=0, remedy="Pass 10.")
