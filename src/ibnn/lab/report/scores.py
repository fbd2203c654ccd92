"""SCORES: the numbers of a report, from the answers of the runs."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ibnn import metrics
from ibnn.lab.report.runs import Answers, Run
from ibnn.metrics import Interval

METRICS = {"error": ("error %", 1), "nll": ("NLL", 3), "ece": ("ECE", 3), "brier": ("Brier", 3)}  # name, digits
DOUBTS = ("largest probability", "total entropy", "epistemic part")


class Detection(NamedTuple):
    """How well a score of doubt tells one set from the test set."""

    auroc: float
    fpr95: float


def intervals(answers: Answers, labels: Tensor) -> dict[str, Interval]:
    """Error in %, NLL, ECE and Brier score with 95 % bootstrap intervals."""
    probs = answers.probs
    tiny = torch.finfo(probs.dtype).tiny  # a probability that was rounded to 0 would make the mean infinite
    found = metrics.score_intervals(probs, probs.clamp_min(tiny).double().log(), labels)
    return found | {"error": Interval(*(100 * value for value in found["error"]))}


def doubts(answers: Answers) -> dict[str, Tensor | None]:
    """Scores that grow with doubt, by name, (N,)."""
    scores = (1 - answers.probs.max(1).values.double(), answers.total, answers.epistemic)
    return dict(zip(DOUBTS, scores, strict=True))


def detections(test: Answers, other: Answers) -> dict[str, Detection | None]:
    """AUROC and FPR95 of each score of doubt; None where the method has no such score."""
    found: dict[str, Detection | None] = {}
    for (name, inside), outside in zip(doubts(test).items(), doubts(other).values(), strict=True):
        found[name] = None
        if inside is not None and outside is not None:
            found[name] = Detection(metrics.auroc(inside, outside), metrics.fpr_at_95_tpr(inside, outside))
    return found


def selective(answers: Answers, labels: Tensor) -> metrics.RiskCoverage:
    """Risk over coverage when the rows of the highest confidence are answered first."""
    confidence, guess = answers.probs.max(1)
    return metrics.risk_coverage(1 - confidence, guess == labels)


def mean_parts(run: Run) -> dict[str, Tensor]:
    """Mean aleatoric, between and within (3,) of right answers, wrong answers and each further set."""
    assert run.test is not None
    if run.test.parts is None:
        return {}
    wrong = run.test.probs.argmax(1) != run.labels
    sets = {"right answers": run.test.parts[:, ~wrong], "wrong answers": run.test.parts[:, wrong]}
    sets |= {name: answers.parts for name, answers in run.ood.items() if answers.parts is not None}
    return {name: parts.mean(1) for name, parts in sets.items() if parts.shape[1]}


def best(scores: Mapping[int, float], digits: int) -> set[int]:
    """The runs of the lowest score as it is printed, ties included; none if there is nothing to compare.

    >>> sorted(best({0: 0.1001, 1: 0.1002, 2: 0.2}, 3))
    [0, 1]
    """
    printed = {number: round(value, digits) for number, value in scores.items()}
    return {number for number, value in printed.items() if len(printed) > 1 and value == min(printed.values())}


def contradictions(run: Run, found: Mapping[str, Interval]) -> list[str]:
    """Scores in result.json that are not those of the answers beside it, in words; the error may be a share or in %."""
    words = []
    for name, (value, _, _) in found.items():
        said = run.scores.get(name, value)
        ways = (said, 100 * said) if name == "error" else (said,)
        if min(abs(way - value) for way in ways) > 1e-3 * max(1, abs(value)):
            words.append(f"{METRICS[name][0]} is {said:.4g} in result.json but {value:.4g} by the stored answers")
    return words
