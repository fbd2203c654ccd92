"""Does sampling the latents pay? The mixture that `fit` learns against chains over z with the same weights.

    IBNN_DATA=FOLDER python experiments/sampling.py [digits digits-wide] [--seeds 0]

Weights and mixture come from one `fit` (four components, held-out labels steer the noise); then z is sampled on the
training part at several temperatures T of the posterior: 1 is Bayes. Which T is best is chosen by the held-out NLL.
Digits: an MLP of 32 hidden units; *digits-wide*: the same weights with the prior N(1, 0.3²) in place of the one that
`fit` steered to, which leaves the chains much further to go. Cells of other samplers (SGHMC, also on minibatches of 256
rows, SGLD, cycles) were run before the library was left with HMC alone.
Test scores are of 10 draws per component. Writes results/sampling.json.
"""

import argparse
import copy
import sys
from typing import Any

import torch
from common import NOTES, Data, Results, Splits, parts, scores
from tables import fill_in

import ibnn
from ibnn.data import load
from ibnn.nets import mlp

COMPONENTS, DRAWS = 4, 10
EPOCHS, SAMPLES, WARMUP = 40, 24, 50
TEMPERATURES: dict[str, tuple[float, ...]] = {"digits": (1.0,), "digits-wide": (1.0,)}


def data(seed: int) -> Splits:
    """Training, held-out and test data."""
    digits: Any = load("digits")
    whole = Data(digits.normalise(digits.train.images).flatten(1), digits.train.labels)
    train, valid = parts(whole, [len(whole.y) - 200, 200], seed)
    return Splits(train, valid, Data(digits.normalise(digits.test.images).flatten(1), digits.test.labels))


def scored(model: ibnn.IBNN, splits: Splits) -> dict[str, Any]:
    """Scores on held-out and test data, and how much of the uncertainty is epistemic."""
    answers: dict[str, Any] = {
        part: model.predict(getattr(splits, part).x, samples=DRAWS, progress=False, novelty=False)
        for part in ("valid", "test")
    }
    share = float(answers["test"].epistemic.mean() / answers["test"].total.mean())
    found = {part: scores(answer.log_probs, getattr(splits, part).y) for part, answer in answers.items()}
    return found | {"epistemic share": share}


def fitted(name: str, splits: Splits, seed: int) -> tuple[ibnn.IBNN, float]:
    """A network and its mixture, and the seconds of training."""
    torch.manual_seed(seed)
    model = ibnn.convert(mlp(64, 10, hidden=32), components=COMPONENTS, seed=seed)
    history = ibnn.fit(model, splits.train, splits.valid, epochs=EPOCHS, seed=seed, quiet=True, novelty=False)
    model.prior_std = 0.3 if name == "digits-wide" else model.prior_std
    return model.eval(), history.seconds


def sampled(model: ibnn.IBNN, splits: Splits, seed: int, temperature: float) -> dict[str, Any]:
    """Chains at a temperature: their agreement, scores of the bank, and of the mixture of its moments."""
    model = copy.deepcopy(model)
    options: Any = {"samples": SAMPLES, "warmup": WARMUP, "seed": seed, "temperature": temperature}
    found = ibnn.sample(model, splits.train, progress=False, **options)
    result = {"bank": scored(model, splits)}
    std = float(model.posterior().std.detach().mean())
    model.set_posterior()
    own: dict[str, Any] = {"rhat": float(found.rhat.quantile(0.95)), "ess": float(found.ess.median()), "std": std}
    own |= {"energy": float(found.energy.mean())}
    own |= {"step": found.step_size, "acceptance": found.acceptance, "divergent": found.divergent}
    return result | {"moments": scored(model, splits), "chains": own, "sampling seconds": round(found.seconds, 1)}


def table(cells: dict[str, Any]) -> str:
    """The cells as Markdown: the mixture, banks, and mixtures of banks' moments."""
    head = [
        "setting",
        "posterior",
        "T",
        "held-out NLL",
        "error %",
        "NLL",
        "ECE",
        "epistemic",
        "mean σ",
        "energy",
        "R̂",
        "ESS",
        "seconds",
    ]
    lines = ["| " + " | ".join(head) + " |", "| --- | --- |" + " ---: |" * (len(head) - 2)]
    for name, cell in cells.items():
        setting, posterior, *words = name.split()
        kinds = [(posterior, cell)] if posterior == "mixture" else [(posterior, cell["bank"])]
        kinds += [(f"{posterior}, its moments", cell["moments"])] if posterior == "sghmc" else []
        for kind, found in kinds:
            own, test = kind == posterior and posterior != "mixture", found["test"]
            row = [setting, kind, words[0].removeprefix("T=") if posterior != "mixture" else "–"]
            row += [f"{found['valid']['nll']:.3f}", f"{100 * test['error']:.2f}", f"{test['nll']:.3f}"]
            row += [f"{test['ece']:.3f}", f"{found['epistemic share']:.2f}"]
            row += [f"{cell['std'] if posterior == 'mixture' else cell['chains']['std']:.3f}"]
            chains = cell.get("chains", {})
            row += [f"{chains['energy']:.0f}", f"{chains['rhat']:.2f}", f"{chains['ess']:.0f}"] if own else ["–"] * 3
            row += [f"{cell['fit seconds' if posterior == 'mixture' else 'sampling seconds']:.0f}"]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def page(check: bool) -> int:
    """Fills the table in, or says whether it is out of date."""
    return fill_in({NOTES / "sampling.md": {"sampling": table(Results("sampling", "").cells)}}, check)


def main() -> int:
    """Runs what is not there yet; with --page fills in notes/sampling.md instead."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("names", nargs="*", default=list(TEMPERATURES))
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--page", action="store_true")
    arguments.add_argument("--check", action="store_true")
    given = arguments.parse_args()
    if given.page:
        return page(given.check)
    torch.set_num_threads(1)
    results = Results("sampling", "Mixtures of `fit` against chains over z with the same weights")
    for name in given.names:
        for seed in given.seeds:
            splits = data(seed)
            model, seconds = fitted(name, splits, seed)
            facts = {"prior_std": model.prior_std, "likelihood temperature": float(model.likelihood.temperature)}
            facts |= {"std": float(model.posterior().std.detach().mean()), "fit seconds": round(seconds, 1)}
            if name != "digits-wide":  # the mixture of digits
                results.run(f"{name} mixture seed {seed}", lambda: scored(model, splits) | facts)  # noqa: B023
            for t in TEMPERATURES[name]:
                results.run(f"{name} hmc T={t:g} seed {seed}", lambda: sampled(model, splits, seed, t))  # noqa: B023
    return 0


if __name__ == "__main__":
    sys.exit(main())
