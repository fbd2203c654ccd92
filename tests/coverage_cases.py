"""Which new targets are covered by each kind of set and interval, on made data whose probabilities are wrong."""

from typing import Any

import torch
from torch import Tensor, nn

import ibnn
from ibnn import baselines

KINDS: dict[str, dict[str, Any]] = {
    "smallest": {},
    "adaptive": {"kind": "adaptive"},
    "penalty": {"kind": "adaptive", "penalty": 0.1},
    "by class": {"by_class": True},
}


def classes(rows: int, seed: int, places: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of four classes and labels drawn from other probabilities: the model is wrong, and unequally so."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, places, 4) if places else (rows, 4)
    hardness = torch.rand(rows, *[1] * (len(shape) - 1), generator=generator) * 3
    logits = torch.randn(shape, generator=generator) * hardness
    noisy = (0.5 * logits + 0.5 * torch.randn(shape, generator=generator)).softmax(-1)
    y = torch.multinomial(noisy.reshape(-1, 4), 1, generator=generator).reshape(shape[:-1])
    return logits, y


class Same(nn.Module):
    """Returns its inputs; a head for each name if there are names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.idle = names, nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Any:
        return {name: x[:, 4 * i : 4 * i + 4] for i, name in enumerate(self.names)} if self.names else x


def covered(kind: str, n: int, seed: int, new: int = 20) -> Tensor:
    """Which of some new targets are covered at 90 %, by `n` held-out rows; (new, …)."""
    options, rows = KINDS.get(kind, {}), n + new
    held, late = slice(0, n), slice(n, None)
    x, y = classes(rows, seed, places=6 if kind == "tokens" else 0)
    if kind in KINDS:
        model = baselines.Plain(Same())
        ibnn.conformalize(model, (x[held], y[held]))
        return model.predict(x[late]).set(0.9, **options).gather(1, y[late, None])[:, 0]
    if kind == "tokens":
        y = torch.where(torch.rand(y.shape, generator=torch.Generator().manual_seed(seed)) < 0.3, -100, y)
        y[:, 0] = y[:, 0].clamp_min(0)
        model = baselines.Plain(Same(), ibnn.Categorical(axis=-1))
        ibnn.conformalize(model, (x[held], y[held]))
        inside = model.predict(x[late]).set(0.9).gather(-1, y[late].clamp_min(0)[..., None])[..., 0]
        kept = y[late] >= 0
        return (inside & kept).sum(1) / kept.sum(1)
    if kind == "groups":
        g = (torch.arange(rows) % 3 == 0).long()
        x = x + g[:, None] * torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)) * 3  # worse answers
        model = baselines.Plain(Same())
        ibnn.conformalize(model, (x[held], y[held]), groups=g[held])
        inside = model.predict(x[late]).set(0.9, groups=g[late]).gather(1, y[late, None])[:, 0]
        return inside[g[late] == 1]
    if kind in ("labels", "one logit"):
        width = 1 if kind == "one logit" else 4
        logits = x[:, :width]
        yes = (
            torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < (0.5 * logits).sigmoid()
        ).float()
        model = baselines.Plain(Same(), ibnn.Bernoulli())
        ibnn.conformalize(model, (logits[held], yes[held]))
        return model.predict(logits[late]).set(0.9).gather(-1, yes[late].long()[..., None])[..., 0]
    noise = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)) * torch.tensor([0.1, 1, 3, 9])
    numbers = {"a": y, "b": x + noise}
    if kind == "intervals":
        model = baselines.Plain(Same(), ibnn.Gaussian(init_std=0.5))
        ibnn.conformalize(model, (x[held], numbers["b"][held]))
        low, high = model.predict(x[late]).interval(0.9, conformal=True)
        return (low <= numbers["b"][late]) & (numbers["b"][late] <= high)
    assert kind == "heads"
    both = torch.cat([x, x], 1)
    model = baselines.Plain(Same("a", "b"), ibnn.Heads({"a": ibnn.Categorical(), "b": ibnn.Gaussian(init_std=0.5)}))
    ibnn.conformalize(model, (both[held], {name: part[held] for name, part in numbers.items()}))
    p = model.predict(both[late])
    low, high = p["b"].interval(0.9, conformal=True)
    inside = p["a"].set(0.9).gather(1, y[late, None])
    return torch.cat([inside, (low <= numbers["b"][late]) & (numbers["b"][late] <= high)], 1)


EVERY = [*KINDS, "tokens", "groups", "labels", "one logit", "intervals", "heads"]
