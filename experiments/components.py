"""Do components pay? K > 1 against K = 1 of the same steered noise, and against deep ensembles.

    IBNN_DATA=FOLDER python experiments/components.py [--seeds 0 1]

LeNet of width 2 on 2,000 Fashion-MNIST images (200 of them held out), 100 epochs; the held-out labels steer the noise
of every iBNN (beta="auto"). Scored on 10,000 further *training* images: the answer decides a default, so the test set
stays out of it. Writes results/components.json.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from common import Results, Splits, images, parts, tempered_scores, train_plain
from strength import fashion

import ibnn
from ibnn.baselines import Ensemble, Plain
from ibnn.nets import LeNet

WIDTH, EPOCHS = 2, 100


def data(seed: int) -> Splits:
    """The strength experiment's splits, with development images in the place of the test set."""
    _, dev = parts(images("fashion-mnist", train=True), [2_000, 10_000], seed)
    return fashion("2000-w2", seed)._replace(test=dev)


def scored(model: Any, splits: Splits, samples: int = 5) -> dict[str, Any]:
    """Scores on development images, without and with a temperature of the held-out labels."""
    found = tempered_scores(model, splits.valid, splits.test, samples)
    return {"dev": found["test"], "tempered": found["tempered"]}


def latents(
    seed: int, *, components: int, kl: Any = "mean", init_std: float = 0.5, fixed: bool = False, signs: float = 0.0,
    **recipe: Any,
) -> dict[str, Any]:  # fmt: skip
    """An iBNN; its σ starts out alike whatever the KL."""
    splits = data(seed)
    torch.manual_seed(seed)
    net = LeNet(width=WIDTH).to(memory_format=torch.channels_last)
    start = 0.3 / math.sqrt(components) if kl == "mean" else 0.3
    model = ibnn.convert(net, components=components, kl=kl, init_std=init_std, prior_std=start, seed=seed)
    if signs:  # of hidden nodes, as rank-1 networks begin
        mean = model.posterior().mean.detach()
        flip = torch.rand(mean.shape, generator=torch.Generator().manual_seed(seed)) < signs
        flip[:, 0] = False
        model.set_posterior(mean=torch.where(flip, -mean, mean))
    for latent in model.latents.values():
        latent.mean.requires_grad_(not fixed)
    ibnn.fit(
        model, splits.train, splits.valid, beta="auto", epochs=EPOCHS, evaluate_every=EPOCHS, seed=seed, quiet=True,
        **recipe,
    )  # fmt: skip
    samples = 5 * max(1, 8 // components)
    dev = model.predict(splits.test.x, samples=samples, progress=False)
    assert isinstance(dev, ibnn.CategoricalPrediction)
    q = model.posterior()
    spread = float(q.mean.std(0, correction=0).mean())
    result = scored(model, splits, samples) | {"prior_std": model.prior_std, "spread": spread}
    return result | {"std": float(q.std.mean()), "between share": float(dev.between.sum() / dev.epistemic.sum())}


def ensemble(seed: int, *, members: int, epochs: int) -> dict[str, Any]:
    """Plain networks, their probabilities averaged."""
    splits, nets = data(seed), []
    for own in range(seed, seed + 1000 * members, 1000):
        torch.manual_seed(own)
        net = LeNet(width=WIDTH).to(memory_format=torch.channels_last)
        nets.append(train_plain(net, splits.train, epochs=epochs, seed=own).net)
    return scored(Ensemble(nets) if members > 1 else Plain(nets[0]), splits)


VARIANTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda seed: ensemble(seed, members=1, epochs=EPOCHS),
    "ensemble of 4, a quarter of the epochs each": lambda seed: ensemble(seed, members=4, epochs=EPOCHS // 4),
    "ensemble of 4, four times the cost": lambda seed: ensemble(seed, members=4, epochs=EPOCHS),
    "K=1": lambda seed: latents(seed, components=1, kl="components", init_std=0.1),
    "K=8, components KL": lambda seed: latents(seed, components=8, kl="components", init_std=0.1),
    "K=8": lambda seed: latents(seed, components=8),
    "K=8, init_std .1": lambda seed: latents(seed, components=8, init_std=0.1),
    "K=8, means fixed": lambda seed: latents(seed, components=8, fixed=True),
    "K=16": lambda seed: latents(seed, components=16),
    "K=8, signs .2": lambda seed: latents(seed, components=8, signs=0.2, fixed=True),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    results = Results("components", str(__doc__))
    for seed in options.seeds:
        for name in options.only:
            results.run(f"{name} / seed {seed}", lambda name=name, seed=seed: VARIANTS[name](seed))  # type: ignore[misc]
