"""Do components pay? K > 1 against K = 1 of the same steered noise, and against deep ensembles.

    IBNN_DATA=FOLDER python experiments/components.py [--seeds 0 1]

LeNet of width 2 on 2,000 Fashion-MNIST images (200 of them held out), 100 epochs; every iBNN has its strength steered
by the held-out labels (beta="auto"). Scored on 10,000 further *training* images: the answer decides a default, so the
test set stays out of it. Writes results/components.json.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from common import Data, Results, Splits, data_folder, fit_temperature, images, logits, scores, train_plain
from strength import fashion

import ibnn
from ibnn.nets import LeNet

WIDTH, EPOCHS = 2, 100


def data(seed: int) -> Splits:
    """The strength experiment's splits, with development images in the place of the test set."""
    parts = fashion("2000-w2", seed)
    whole = images(data_folder(), "fashion-mnist", train=True)
    order = torch.randperm(len(whole.y), generator=torch.Generator().manual_seed(seed))[2_000:12_000]
    return parts._replace(test=Data(whole.x[order], whole.y[order]))


def scored(valid: torch.Tensor, dev: torch.Tensor, parts: Splits) -> dict[str, Any]:
    """Scores as they are, and with a temperature of the held-out labels."""
    temperature = fit_temperature(valid, parts.valid.y)
    return {"dev": scores(dev, parts.test.y), "tempered": scores(dev / temperature, parts.test.y)}


def latents(
    seed: int, *, components: int, kl: Any = "mean", init_std: float = 0.5, fixed: bool = False, signs: float = 0.0,
    **recipe: Any,
) -> dict[str, Any]:  # fmt: skip
    """An iBNN; its σ starts out alike whatever the KL."""
    parts = data(seed)
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
        model, parts.train, parts.valid, beta="auto", epochs=EPOCHS, evaluate_every=EPOCHS, seed=seed, quiet=True,
        **recipe,
    )  # fmt: skip
    samples = 5 * max(1, 8 // components)
    valid, dev = (model.predict(part.x, samples=samples, progress=False) for part in (parts.valid, parts.test))
    q = model.posterior()
    spread = float(q.mean.std(0, correction=0).mean())
    result = scored(valid.log_probs, dev.log_probs, parts) | {"prior_std": model.prior_std, "spread": spread}
    return result | {"std": float(q.std.mean()), "between share": float(dev.between.sum() / dev.epistemic.sum())}


def ensemble(seed: int, *, members: int, epochs: int) -> dict[str, Any]:
    """Plain networks, their probabilities averaged."""
    parts = data(seed)
    outputs = []
    for member in range(members):
        torch.manual_seed(seed + 1000 * member)
        net = LeNet(width=WIDTH).to(memory_format=torch.channels_last)
        train_plain(net, parts.train, epochs=epochs, seed=seed + 1000 * member)
        outputs.append([logits(net, part.x).log_softmax(1) for part in (parts.valid, parts.test)])
    mean = [torch.stack(each).logsumexp(0) - math.log(members) for each in zip(*outputs, strict=True)]
    return scored(*mean, parts)


VARIANTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda seed: ensemble(seed, members=1, epochs=EPOCHS),
    "ensemble of 4, a quarter of the epochs each": lambda seed: ensemble(seed, members=4, epochs=EPOCHS // 4),
    "ensemble of 4, four times the cost": lambda seed: ensemble(seed, members=4, epochs=EPOCHS),
    "K=1": lambda seed: latents(seed, components=1, kl="components", init_std=0.1),
    "K=8, components KL": lambda seed: latents(seed, components=8, kl="components", init_std=0.1),
    "K=8": lambda seed: latents(seed, components=8),
    "K=8, init_std .1": lambda seed: latents(seed, components=8, init_std=0.1),
    "K=8, init_std .75": lambda seed: latents(seed, components=8, init_std=0.75),
    "K=8, means fixed": lambda seed: latents(seed, components=8, fixed=True),
    "K=16": lambda seed: latents(seed, components=16),
    "K=8, latent_lr .03": lambda seed: latents(seed, components=8, latent_lr=0.03),
    "K=8, signs .2": lambda seed: latents(seed, components=8, signs=0.2, fixed=True),
    "K=8, gamma 1": lambda seed: latents(seed, components=8, gamma=1.0),
    "K=8, S=2 spread (twice the cost)": lambda seed: latents(seed, components=8, samples=2, spread=True),
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
