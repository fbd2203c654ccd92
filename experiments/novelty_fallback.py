"""Which part of the uncertainty is epistemic, and from which p-value on may answers fall back? On data of no table.

    IBNN_DATA=FOLDER python experiments/novelty_fallback.py [--cells mnist-17 digits-23 fallback …]

`mnist-…`: LeNets of the images of novelty_choice.py, training images all of them; `digits-…`: 8 × 8
digits without two classes that the tables know; `synthetic-…`: tables of other seeds. For each form of the split: AUROC
of the epistemic part, and of the total. NLL without and with the fallback, and if its weight also looks at the p-value
of the answer's largest score. `small-…`: what the fallback costs on clean inputs where few are held out, in nats, means
over many splits. Writes results/novelty-fallback.json.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from common import Data, Results, parts, scores
from novelty import without
from novelty_choice import CELLS as IMAGES
from novelty_choice import problem
from sklearn.datasets import load_breast_cancer, load_digits, load_wine, make_classification
from torch import Tensor

import ibnn
from ibnn import metrics
from ibnn.baselines import Plain
from ibnn.nets import LeNet, mlp
from ibnn.novelty.measure import fallback_weight, see
from ibnn.novelty.ranks import log_tail, p_values

FORMS: dict[str, Callable[[Tensor], Tensor]] = {  # share of the aleatoric part that stays, by log p
    "draws alone": torch.ones_like,
    "p / 0.05": lambda p: (p - math.log(0.05)).clamp_max(0).exp(),
    "p / 0.2": lambda p: (p - math.log(0.2)).clamp_max(0).exp(),
    "p / 0.5": lambda p: (p - math.log(0.5)).clamp_max(0).exp(),
    "p": torch.exp,
    "Bayes factor": lambda p: torch.where(p < -1, -p * (p + 1).exp(), 1.0),
}

WIDER = (0, 1, 2, 3)  # standard errors of the shape that are added to it
TAILS = ("exponential", "Lomax", "Pareto", *(f"generalised Pareto + {wider}" for wider in WIDER))
CHOSEN = "generalised Pareto + 1"


def tails(model: Any, x: Tensor) -> dict[str, Tensor]:
    """log p of inputs, continued beyond the highest score by tails of several forms."""
    reference = model.reference
    layers, axes = model._layers_of(reference)
    seen = [see(model, part, layers, axes) for part in x.split(500)]
    distances = torch.cat([reference.distances([s.summaries[n] for n in layers]) for s in seen], 1)
    given = reference.score(distances, torch.cat([s.surprise for s in seen]))
    inside = p_values(reference.scores, given).double().log()
    top = reference.scores[-max(int(len(reference.scores) * 0.1), 2) :].double()
    excess, number = top - top[0], len(top) - 1
    mean, beyond = float(excess.sum() / number), (given.double() - top[-1]).clamp_min(0)
    rank = (torch.arange(number, dtype=torch.float64) + 0.65) / number  # of the excesses, but for the 0
    half = mean - 2 * float((excess[1:] * (1 - rank)).mean())
    shape = min(max(2 - mean / max(half, 1e-9 * mean), 0.0), 0.9)  # by probability-weighted moments
    made = {"exponential": -beyond / mean, "Lomax": -number * (beyond / mean / number).log1p()}
    made["Pareto"] = -(beyond / top[-1]).log1p() / float((top / top[0]).log().sum() / number)
    for wider in WIDER:
        xi = shape + wider / number**0.5 + 1e-6
        scale = mean * (1 - shape) + xi * float(excess[-1])
        made[f"generalised Pareto + {wider}"] = -(xi * beyond / scale).log1p() / xi
    return {name: (inside + fall).float() for name, fall in made.items()}


def images(name: str) -> tuple[Any, Data, dict[str, Tensor], Data]:
    """A model of training images without two classes; comparison images, others to tell, and how they were changed."""
    _, (train, first, last, test), foreign = problem(*IMAGES[name])
    valid = Data(torch.cat([first.x, last.x]), torch.cat([first.y, last.y]))
    torch.manual_seed(0)
    model = ibnn.convert(LeNet(classes=8), seed=0)
    ibnn.fit(model, train, valid, epochs=12, evaluate_every=12, quiet=True)
    return model, test, foreign, valid


def digits(name: str) -> tuple[Any, Data, dict[str, Tensor], Data]:
    """A model of 8 × 8 digits without two classes."""
    a, b = (int(number) for number in name[-2:])
    x, y = load_digits(return_X_y=True)
    known, near = without((a, b), Data(torch.tensor(x).float() / 16, torch.tensor(y)))
    train, valid, test = parts(known, [700, 300, len(known.y) - 1000], 7)
    foreign = {
        "classes": near,
        "turned": test.x.view(-1, 8, 8).rot90(1, (1, 2)).flatten(1),
        "half": test.x.clamp_max(0.5),
    }
    return *_fitted(train, valid), test, foreign, valid


def synthetic(name: str) -> tuple[Any, Data, dict[str, Tensor], Data]:
    """A model of a table; rows whose columns are exchanged, or moved by three deviations."""
    seed = int(name[-1])
    made = make_classification(1500, 8 + 4 * seed, n_informative=5, n_classes=2 + seed, random_state=100 + seed)
    x, y = torch.tensor(made[0]).float(), torch.tensor(made[1])
    train, valid, test = parts(Data((x - x.mean(0)) / x.std(0), y), [600, 300, 600], seed)
    generator = torch.Generator().manual_seed(3)
    shuffled = torch.stack([c[torch.randperm(len(c), generator=generator)] for c in test.x.T], 1)
    moved = test.x + 3 * torch.eye(x.shape[1])[torch.randint(x.shape[1], (600,), generator=generator)]
    return *_fitted(train, valid), test, {"columns shuffled": shuffled, "moved": moved}, valid


def _fitted(train: Data, valid: Data) -> tuple[Any]:
    torch.manual_seed(0)
    model = ibnn.convert(mlp(train.x.shape[1], int(train.y.max()) + 1, hidden=64), seed=0)
    ibnn.fit(model, train, valid, epochs=40, evaluate_every=40, quiet=True)
    return (model,)


def split(made: tuple[Any, Data, dict[str, Tensor], Data]) -> dict[str, Any]:
    """AUROC of the epistemic part in every form, and what answers are worth."""
    model, test, foreign, _ = made
    reference, kinds = model.reference, {"test": test.x, **foreign}
    found: dict[str, dict[str, Tensor]] = {}
    nll: dict[str, dict[str, float]] = {}
    for kind, x in kinds.items():
        off = model.predict(x, fallback=0, progress=False)
        by_tail = tails(model, x)
        log_p = by_tail[CHOSEN]
        level = float(reference.fallback)
        w = fallback_weight(log_p, level)
        on = model.likelihood.fall_back(off, w, reference.base)
        found[kind] = {"total": on.total}
        for form, share in FORMS.items():
            found[kind][form] = on.epistemic + (1 - share(log_p)) * on.aleatoric
        found[kind]["without fallback"] = off.epistemic
        if len(x) == len(test.y):
            outputs = torch.cat([model.mean_output(part) for part in x.split(500)]).detach()
            sure = log_tail(reference.ranks[-1], model.likelihood.surprise(outputs)).exp()
            tempered = w + (1 - w) * sure * (sure > 0.5)
            others = {name: fallback_weight(p, level) for name, p in by_tail.items()}
            also = model.likelihood.fall_back(off, tempered, reference.base)
            answers = {"without": off, "with": on, "with, unless the answer is sure": also}
            answers |= {name: model.likelihood.fall_back(off, o, reference.base) for name, o in others.items()}
            nll[kind] = {name: scores(p.log_probs, test.y)["nll"] for name, p in answers.items()}
            nll[kind]["error"] = scores(off.log_probs, test.y)["error"]
    auroc = {k: {form: metrics.auroc(found["test"][form], v) for form, v in found[k].items()} for k in foreign}
    return {"auroc": auroc, "nll": nll, "fallback": float(reference.fallback)}


# ------------------------------------------------------------------------------------------------- few are held out


def small(name: str, splits: int = 40) -> dict[str, Any]:
    """What the fallback costs on clean inputs, of networks with so few held-out inputs, and what it does far away."""
    rows: dict[str, list[list[float]]] = {}
    for seed in range(4):
        train, pool = _table(name, seed)
        torch.manual_seed(seed)
        model = Plain(mlp(train.x.shape[1], int(train.y.max()) + 1, hidden=64))
        ibnn.fit(model, train, epochs=40, evaluate_every=40, seed=seed, quiet=True, novelty=False)
        for held_out in (60, 120, 240):
            if held_out > 0.7 * len(pool.y):
                continue
            for number in range(splits // 4):
                valid, test = parts(pool, [held_out, len(pool.y) - held_out], 100 * seed + number)
                for rule, found in _costs(model, train, valid, test).items():
                    rows.setdefault(f"{held_out} held out, {rule}", []).append(found)
    means = {key: torch.tensor(found, dtype=torch.float64).mean(0).tolist() for key, found in rows.items()}
    names = ("nll", "cost", "share touched", "weight at 10 x", "weight at 100 x")
    return {"splits": splits, "rules": {key: dict(zip(names, values, strict=True)) for key, values in means.items()}}


def _table(name: str, seed: int) -> tuple[Data, Data]:
    """Training data, and all that is held out of it or tested by."""
    if name.startswith("synthetic"):
        made = make_classification(1200, 10, n_informative=5, n_classes=3, class_sep=2.0, random_state=200 + seed)
    else:
        load = {"digits": load_digits, "wine": load_wine, "breast_cancer": load_breast_cancer}[name.split(",")[0]]
        made = load(return_X_y=True)
    x, y = torch.tensor(made[0]).float(), torch.tensor(made[1])
    x = x / 16 if name == "digits" else (x - x.mean(0)) / x.std(0).clamp_min(1e-3)
    few = 90 if name == "wine" else 250 if name == "breast_cancer" else 600
    train, pool = parts(Data(x, y), [few, len(y) - few], 50 + seed)
    return train, pool


def _costs(model: Plain, train: Data, valid: Data, test: Data) -> dict[str, list[float]]:
    """NLL, cost, share of test inputs touched, and the answer's mean weight far away, by rule."""
    ibnn.baselines.scale_temperature(model, valid)
    reference = ibnn.fit_novelty(model, train, valid, fallback=0.001)
    base = reference.base
    answers = {k: model.predict(d.x, fallback=0) for k, d in {"valid": valid, "test": test}.items()}
    own = {
        k: a.log_probs.gather(1, d.y[:, None])[:, 0] for (k, a), d in zip(answers.items(), (valid, test), strict=True)
    }
    rates = {k: base.log()[d.y] for k, d in {"valid": valid, "test": test}.items()}
    nll = -float(own["valid"].mean())
    w = (torch.arange(100) + 0.5)[:, None] / 100  # a known input's p-value below a is uniform
    lost = (own["valid"] - torch.logaddexp(own["valid"] + w.log(), rates["valid"] + (1 - w).log())).mean(0)
    bound = min(0.005 * nll / float(lost.mean().clamp_min(1e-9)), 0.001)
    found: dict[str, list[float]] = {}
    given = {k: tails(model, x) for k, x in {"test": test.x, "10 x": 10 * test.x, "100 x": 100 * test.x}.items()}
    for tail in TAILS:
        log_p = {kind: by_tail[tail] for kind, by_tail in given.items()}
        for rule, level in {"0.001": 0.001, "bound": bound, "bound / 4": bound / 4}.items():
            weight = {k: fallback_weight(p, level) for k, p in log_p.items()}
            mixed = torch.logaddexp(own["test"] + weight["test"].log(), rates["test"] + (-weight["test"]).log1p())
            cost = float((own["test"] - mixed).mean())
            touched = float((weight["test"] < 1).double().mean())
            found[f"{tail}, {rule}"] = [
                -float(own["test"].mean()),
                cost,
                touched,
                *(float(weight[f].mean()) for f in ("10 x", "100 x")),
            ]
    return found


TABLES = ("digits", "digits, standardised", "wine", "breast_cancer", "synthetic")
CELLS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"digits-{pair}": lambda pair=pair: split(digits(pair)) for pair in ("01", "23", "45", "67")},  # type: ignore[misc]
    **{f"synthetic-{n}": lambda n=n: split(synthetic(f"synthetic-{n}")) for n in range(4)},  # type: ignore[misc]
    **{name: lambda name=name: split(images(name)) for name in IMAGES if name.startswith("mnist")},  # type: ignore[misc]
    **{f"small-{name}": lambda name=name: small(name) for name in TABLES},  # type: ignore[misc]
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    options = parser.parse_args()
    results = Results("novelty-fallback", str(__doc__))
    for cell_name in options.cells:
        results.run(cell_name, CELLS[cell_name])
