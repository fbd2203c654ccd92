"""REPORTED SCORES: the numbers of a report, computed from the stored answers of the runs."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ibnn import metrics
from ibnn.lab.display import SCORES, UNCERTAINTIES
from ibnn.lab.report.runs import Answers, Classifier
from ibnn.metrics import Interval

DIGITS = {"error": 1, "nll": 3, "ece": 3, "brier": 3}  # that are printed


class Detection(NamedTuple):
    """How well an uncertainty separates one set from the test set."""

    auroc: float
    fpr95: float


def intervals(answers: Answers, labels: Tensor) -> dict[str, Interval]:
    """Returns error in %, NLL, ECE and Brier score with 95 % bootstrap intervals."""
    probs = answers.probs
    tiny = torch.finfo(probs.dtype).tiny  # a probability that was rounded to 0 would make the mean infinite
    found = metrics.score_intervals(probs, probs.clamp_min(tiny).double().log(), labels)
    return found | {"error": Interval(*(100 * value for value in found["error"]))}


def uncertainties(answers: Answers) -> dict[str, Tensor | None]:
    """Returns scores (N,) that grow with uncertainty; None where the method has no such score."""
    scores = (1 - answers.probs.max(1).values.double(), answers.total, answers.epistemic)
    return dict(zip(UNCERTAINTIES, scores, strict=True))


def detections(test: Answers, other: Answers) -> dict[str, Detection | None]:
    """Returns AUROC and FPR95 by each uncertainty; None where the method has no such score."""
    found: dict[str, Detection | None] = {}
    for (name, inside), outside in zip(uncertainties(test).items(), uncertainties(other).values(), strict=True):
        found[name] = None
        if inside is not None and outside is not None:
            found[name] = Detection(metrics.auroc(inside, outside), metrics.fpr_at_95_tpr(inside, outside))
    return found


def selective(run: Classifier) -> metrics.RiskCoverage:
    """Returns risk over coverage when the rows of the highest confidence are answered first."""
    confidence, guess = run.test.probs.max(1)
    return metrics.risk_coverage(1 - confidence, guess == run.labels)


def mean_parts(run: Classifier) -> dict[str, Tensor]:
    """Returns mean aleatoric, between and within (3,) of right answers, wrong answers and each further set."""
    if run.test.parts is None:
        return {}
    wrong = run.test.probs.argmax(1) != run.labels
    sets = {"right answers": run.test.parts[:, ~wrong], "wrong answers": run.test.parts[:, wrong]}
    sets |= {name: answers.parts for name, answers in run.ood.items() if answers.parts is not None}
    return {name: parts.mean(1) for name, parts in sets.items() if parts.shape[1]}


def best(scores: Mapping[int, float], digits: int) -> set[int]:
    """Returns the runs with the lowest printed score, ties included; none if there is nothing to compare.

    >>> sorted(best({0: 0.1001, 1: 0.1002, 2: 0.2}, 3))
    [0, 1]
    """
    printed = {number: round(value, digits) for number, value in scores.items()}
    return {number for number, value in printed.items() if len(printed) > 1 and value == min(printed.values())}


def contradictions(run: Classifier, found: Mapping[str, Interval]) -> list[str]:
    """Describes scores of result.json that disagree with the stored answers; an error may be a share or in %."""
    words = []
    for name, (value, _, _) in found.items():
        stored = run.scores.get(name, value)
        ways = (stored, 100 * stored) if name == "error" else (stored,)
        if min(abs(way - value) for way in ways) > 1e-3 * max(1, abs(value)):
            words.append(f"{SCORES[name]} is {stored:.4g} in result.json but {value:.4g} by the stored answers")
    return words
