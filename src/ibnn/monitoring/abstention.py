"""Decides which answers to withhold, so that those given are seldom wrong."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ibnn import check
from ibnn.errors import complaint
from ibnn.metrics import real
from ibnn.prediction import BernoulliPrediction, CategoricalPrediction, GaussianPrediction

LEVELS = 20  # sets of the most certain answers that are tried as where to abstain: 5 %, 10 %, … 100 %
CONFIDENCE = 0.95
NOVEL = 0.01  # p-value of novelty up to which answers are withheld, where it is known


class Threshold(NamedTuple):
    """A rule that says which answers to withhold, and the evidence for it; made by `ibnn.abstain`."""

    limit: float  #: Answers with a total uncertainty above this are withheld; −inf withholds all.
    coverage: float  #: Share of the labelled answers that are given.
    errors: int  #: Wrong answers among those given.
    bound: float  #: Upper confidence bound on the share of wrong answers among those given.
    novelty: float = 0.0  #: Answers for inputs with a p-value of at most this are withheld, too; 0 for none.

    def __str__(self) -> str:
        if self.limit == -math.inf:
            return "withholds every answer: no set of the labelled answers is right often enough"
        novel = f", and inputs with a p-value of at most {self.novelty:g}" if self.novelty else ""
        given = f"gives {self.coverage:.1%} of the labelled answers, of which at most {self.bound:.1%} are wrong"
        return f"{given}; withholds total uncertainty above {self.limit:.3g} nats{novel}"

    def __call__(self, p: CategoricalPrediction | GaussianPrediction) -> Tensor:
        """Returns which answers of a prediction to withhold, (B,)."""
        return self._found(p).any(0)

    def reasons(self, p: CategoricalPrediction | GaussianPrediction) -> list[str | None]:
        """Returns why each answer is withheld: "novel", "uncertain" or "novel and uncertain"; None if it is given."""
        words = ((None, "uncertain"), ("novel", "novel and uncertain"))
        return [words[n][u] for n, u in self._found(p).T.tolist()]

    def _found(self, p: CategoricalPrediction | GaussianPrediction) -> Tensor:
        """Returns which inputs are novel and which uncertain, (2, B)."""
        uncertain = (p.total > self.limit).reshape(len(p), -1).any(1)
        return torch.stack([p.novel(self.novelty) if self.novelty else torch.zeros_like(uncertain), uncertain])


def abstain(
    p: CategoricalPrediction, target: Any, risk: float = 0.05, *, novelty: float | None = None, confidence: float = 0.95
) -> Threshold:
    """Returns a rule that withholds uncertain and novel answers, so that at most a share `risk` of the rest is wrong.

    `rule(p)` tells which answers of another prediction to withhold, `rule.reasons(p)` why. The guarantee holds with the
    stated confidence, for inputs like the labelled ones: the most certain answers are given, as many as a
    Clopper–Pearson bound on their error rate allows.

    Args:
        p: Predictions for held-out inputs, one class or one yes/no label each, that the model was not trained on.
        target: Their labels, (B,).
        risk: Share of wrong answers among those given that is accepted. Even without an error 5 % takes 59 inputs and
            1 % takes 299; fewer are a ValueError.
        novelty: p-value of novelty up to which answers are withheld, whatever their uncertainty; 0 for never. Default:
            0.01, or the smallest possible p-value if that is larger; 0 without p-values.
        confidence: Probability that the guarantee holds.

    >>> import ibnn
    >>> generator = torch.Generator().manual_seed(0)
    >>> x, noise = torch.randn(2, 600, generator=generator)
    >>> logits = torch.stack([-3 * x, 3 * x], 1)  # of one network, for the sign of x
    >>> p = ibnn.Categorical().summarise(logits[None, None])
    >>> rule = abstain(p, x + 0.3 * noise > 0, risk=0.05)
    >>> f"answers {rule.coverage:.0%}, of which at most {rule.bound:.1%} are wrong"
    'answers 75%, of which at most 3.9% are wrong'
    >>> x[:3], rule.reasons(p)[:3]
    (tensor([-1.1258, -1.1524, -0.2506]), [None, None, 'uncertain'])
    """
    if not isinstance(p, CategoricalPrediction) or p.total.numel() != len(p) or not len(p):
        got = f"{type(p).__name__} of shape {tuple(p.total.shape)}" if hasattr(p, "total") else type(p).__name__
        remedy = "Labels of one input are not independent of each other: choose a limit for p.total on your own data."
        raise ValueError(complaint("p", "predictions of one class for each of some inputs", got, remedy))
    check.share("risk", risk, remedy="Pass risk=0.05.")
    check.share("confidence", confidence, remedy=f"Pass confidence={CONFIDENCE}.")
    check.number("novelty", novelty or 0, least=0, below=1, remedy=f"Pass novelty={NOVEL}, or 0 for never.")
    labels = p.labels.flatten()
    target = real("target", target).to(labels.device)
    if target.shape not in (labels.shape, p.labels.shape):
        expected, remedy = f"of shape {tuple(p.labels.shape)}", "Pass the label of every input of the prediction."
        raise ValueError(complaint("target", expected, f"shape {tuple(target.shape)}", remedy))
    classes = 2 if isinstance(p, BernoulliPrediction) else p.probs.shape[p.axis]
    if bool((outside := (target < 0) | (target >= classes) | (target != target.long())).any()):
        remedy = "Count classes from 0, and leave out other rows."
        raise ValueError(complaint("target", f"classes from 0 to {classes - 1}", target[outside][0].item(), remedy))
    level = novelty if novelty is not None else 0.0 if p.p_value is None else default_level(p.ranked)
    novel = p.novel(level) if level else torch.zeros_like(labels, dtype=torch.bool)
    needed, rows = rows_needed(risk, confidence), int((~novel).sum())
    if rows < needed:
        expected = f"of at least {needed} inputs for risk={risk:g}, which it takes even without an error"
        least = math.ceil(1e3 * (1 - (1 - confidence) ** (1 / max(rows, 1)))) / 1e3
        raise ValueError(complaint("target", expected, rows, f"Hold out more, or pass risk={least:g} or more."))
    wrong = labels != target.flatten().to(labels.dtype)
    return threshold(p.total.flatten(), wrong, risk, novel=novel, confidence=confidence)._replace(novelty=level)


def default_level(ranked: int) -> float:
    """Returns the p-value up to which inputs are withheld as novel by default, with this many held-out inputs."""
    return max(NOVEL, 1 / (ranked + 1)) if ranked else NOVEL


def threshold(
    uncertainty: Tensor, wrong: Tensor, risk: float, *, novel: Tensor | None = None, confidence: float = CONFIDENCE
) -> Threshold:
    """Returns the largest set of the most certain answers whose error rate is, with confidence, at most `risk`.

    The same labels choose one of m sets, so a set's bound is that of Clopper and Pearson at 1 − (1 − confidence) / m
    (Bonferroni). Of the 20 sets, m are large enough to pass if they had no error. Answers for novel inputs are in none.
    """
    uncertainty, wrong = uncertainty.cpu().double(), wrong.cpu()
    known = torch.ones_like(wrong) if novel is None else ~novel.cpu()
    ordered = uncertainty.sort().values
    limits = [ordered[math.ceil(len(uncertainty) * level / LEVELS) - 1].item() for level in range(LEVELS, 0, -1)]
    sets = [(limit, (uncertainty <= limit) & known) for limit in limits]  # ties included; the largest set first
    needed = [rows_needed(risk, 1 - (1 - confidence) / number) for number in range(1, LEVELS + 1)]
    tried = [each for each, least in zip(sets, needed, strict=True) if int(each[1].sum()) >= least]
    miss = (1 - confidence) / max(len(tried), 1)
    for limit, given in tried:
        count, errors = int(given.sum()), int(wrong[given].sum())
        if at_most(errors, count, risk) <= miss:  # then the bound is at most the risk
            return Threshold(limit, count / len(uncertainty), errors, upper_bound(errors, count, miss))
    return Threshold(-math.inf, 0.0, 0, 1.0)


def rows_needed(risk: float, confidence: float = CONFIDENCE) -> int:
    """Returns how many right answers show, with confidence, that at most a share `risk` is wrong.

    >>> rows_needed(0.05), rows_needed(0.01)
    (59, 299)
    """
    return math.ceil(math.log(1 - confidence) / math.log1p(-risk) - 1e-9)


def at_most(errors: int, count: int, rate: float) -> float:
    """Returns the probability of at most this many errors: the binomial CDF."""
    ways = (math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(errors + 1))
    logs = (way + k * math.log(rate) + (count - k) * math.log1p(-rate) for k, way in enumerate(ways))
    return min(1.0, math.fsum(map(math.exp, logs)))


def upper_bound(errors: int, count: int, miss: float) -> float:
    """Returns the Clopper–Pearson bound: the rate at which at most this many errors have probability `miss`."""
    if errors >= count:
        return 1.0
    low, high = errors / count, 1.0
    for _ in range(40):
        rate = (low + high) / 2
        low, high = (rate, high) if at_most(errors, count, rate) > miss else (low, rate)
    return high
