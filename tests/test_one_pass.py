"""One pass: students of known teachers, packed answers, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ibnn
from ibnn import nets
from ibnn.baselines import SWAG, MCDropout, Plain, scale_temperature
from ibnn.likelihood.one_pass import OnePassCategorical, OnePassGaussian
from ibnn.one_pass import Place, distil, mean_network, rank_correlation

N, D = 240, 4
KINDS = ("categorical", "bernoulli", "gaussian")


def rows(n: int = N, seed: int = 0) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed))


def teacher(likelihood: Any = "categorical", net: nn.Module | None = None, std: float = 0.5) -> ibnn.IBNN:
    torch.manual_seed(0)
    made = nets.mlp(D, 3, hidden=16) if net is None else net
    model = ibnn.convert(made, components=2, seed=0, likelihood=likelihood)
    model.set_posterior(std=std)
    return model.eval()


def student(model: Any, **options: Any) -> ibnn.OnePass:
    return distil(model, rows(), **{"epochs": 3, "samples": 3, "copies": 0, "progress": False} | options)


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_the_head_is_exact(kind: str) -> None:
    model = teacher(kind)
    model.set_posterior(mean=1.0, std=0.0)
    model.likelihood.set_temperature(1.7)
    fast, expected = student(model), model.predict(rows())
    found: Any = fast.predict(rows())
    assert fast.exact
    assert "exact" in str(fast)
    for name in ("mean", "variance") if kind == "gaussian" else ("probs", "total"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    assert not found.epistemic.any()


def test_a_linear_gaussian_teacher_is_learnt() -> None:
    """y = w · (x ∘ z) + b: the mean is linear in x, the epistemic variance is Σ (w σ x)², and the noise is known."""
    torch.manual_seed(0)
    net = nn.Linear(D, 1).requires_grad_(False)
    model = ibnn.convert(net, components=1, seed=0, likelihood=ibnn.Gaussian(init_std=0.5))
    model.set_posterior(mean=1.0, std=0.6)
    x, new = rows(4000), rows(300, seed=1)
    fast = distil(model, x, samples=60, progress=False, epochs=30)
    p: Any = fast.predict(new)
    epistemic = (0.6 * net.weight * new).square().sum(1, keepdim=True)
    assert rank_correlation(p.epistemic.flatten(), epistemic.flatten()) > 0.95
    torch.testing.assert_close(p.aleatoric.mean(), torch.tensor(0.25), rtol=0.15, atol=0)
    assert float((p.mean - net(new)).square().mean()) < 0.05 * float(epistemic.mean())
    assert float((p.epistemic - epistemic).abs().mean()) < 0.3 * float(epistemic.mean())
    assert fast.report[""].rank[0] > 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_parts_add_up_and_files_give_the_same_answers(kind: str, tmp_path: Path) -> None:
    fast, x = student(teacher(kind)), rows(20, seed=2)
    p: Any = fast.predict(x)
    torch.testing.assert_close(p.total, p.aleatoric + p.epistemic)
    assert p.between is None
    assert p.within is None
    if kind != "gaussian":
        probs = p.probs if kind == "categorical" else torch.stack([p.probs, 1 - p.probs], -1)
        torch.testing.assert_close(p.total, torch.special.entr(probs).sum(-1), atol=1e-6, rtol=1e-5)
    fast.save_pretrained(tmp_path)
    again: Any = ibnn.load(tmp_path, nets.mlp(D, 3, hidden=16))
    for name in ("probs", "epistemic") if kind != "gaussian" else ("mean", "epistemic", "aleatoric"):
        assert torch.equal(getattr(again.predict(x), name), getattr(p, name))
    assert str(again) == str(fast)
    written = ibnn.export(fast, x[:2], tmp_path / "one.pt2", format="torch")
    answers = torch.export.load(written.path).module()(x)
    torch.testing.assert_close(answers["epistemic"], p.epistemic, atol=1e-5, rtol=1e-4)


def test_a_student_agrees_better_than_the_mean_network() -> None:
    model, x = teacher(std=0.8), rows(1500)
    fast, new = distil(model, x, samples=10, progress=False), rows(400, seed=3)
    expected: Any = model.predict(new, samples=10)
    mean: Any = Plain(mean_network(model)).predict(new)
    found: Any = fast.predict(new)

    def kl(p: Any) -> float:
        return float((expected.probs * (expected.log_probs - p.log_probs)).sum(1).mean())

    assert kl(found) < 0.5 * kl(mean)
    assert rank_correlation(found.epistemic, expected.epistemic) > 0.9


@pytest.mark.parametrize("std", [0.0, 0.5])
@pytest.mark.parametrize("noise", ["learnt", "predicted"])
def test_numbers_in_units_of_their_own(noise: Any, std: float, tmp_path: Path) -> None:
    """As `fit` chooses them where targets are far from unit size."""
    likelihood = ibnn.Gaussian(noise=noise)
    likelihood.location, likelihood.scale = torch.tensor([1000.0, -3.0]), torch.tensor([50.0, 0.01])
    model, x = teacher(likelihood, nets.mlp(D, 2 if noise == "learnt" else 4, hidden=16)), rows(20, seed=2)
    model.set_posterior(mean=1.0, std=std)
    fast, expected = student(model, epochs=20), model.predict(x)
    found: Any = fast.predict(x)
    assert ((found.mean - expected.mean).abs() / expected.std).max() < (0.5 if std else 1e-3)  # type: ignore[attr-defined]
    if not std:
        torch.testing.assert_close(found.std, expected.std)  # type: ignore[attr-defined]
    fast.save_pretrained(tmp_path)
    again: Any = ibnn.load(tmp_path, nets.mlp(D, 2 if noise == "learnt" else 4, hidden=16))
    assert torch.equal(again.predict(x).mean, found.mean)
    written = ibnn.export(fast, x[:2], tmp_path / "one.pt2", format="torch")
    torch.testing.assert_close(torch.export.load(written.path).module()(x)["mean"], found.mean)


def test_held_out_labels_set_the_temperature_of_yes_and_no() -> None:
    fast = student(teacher("bernoulli"))
    labels = fast.predict(rows()).labels.float()  # type: ignore[attr-defined]
    assert 0 < scale_temperature(fast, (rows(), labels)) < 1


def test_packed_answers_of_several_draws_are_mixed() -> None:
    likelihood = OnePassCategorical()
    scores = torch.tensor([[[2.0, 0.0, 0.25]], [[0.0, 1.0, 0.5]]])[:, None]  # (2, 1, 1, C + 1)
    p: Any = likelihood.summarise(scores)
    probs = scores[:, 0, 0, :2].softmax(-1)
    entropies = torch.special.entr(probs).sum(-1)
    torch.testing.assert_close(p.probs[0], probs.mean(0))
    torch.testing.assert_close(p.aleatoric[0], (0.75 * entropies[0] + 0.5 * entropies[1]) / 2)
    torch.testing.assert_close(p.total[0], torch.special.entr(probs.mean(0)).sum())
    numbers = torch.tensor([[[1.0, 0.0, 0.25]], [[3.0, 0.0, 0.5]]])[:, None]
    g: Any = OnePassGaussian().summarise(numbers)
    torch.testing.assert_close(g.epistemic, torch.tensor([1.0 + 0.375]))
    torch.testing.assert_close(g.aleatoric, torch.tensor([0.625]))


class Dense(nn.Module):
    """Classes of pixels, by a 1 × 1 convolution, made twice as large if asked to."""

    def __init__(self, factor: int = 1) -> None:
        super().__init__()
        self.body, self.last, self.factor = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 3, 1), factor

    def forward(self, x: Tensor) -> Tensor:
        found = self.last(self.body(x).relu())
        return nn.functional.interpolate(found, scale_factor=self.factor) if self.factor > 1 else found


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(7, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.words(x)).log_softmax(-1)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(D, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x).relu()
        return {"kind": self.kind(hidden), "size": self.size(hidden)[:, 0]}


def test_heads_read_the_last_layer_or_the_output() -> None:
    pictures = torch.randn(N, 1, 5, 5)
    axis = ibnn.Categorical(axis=1)
    fast = distil(teacher(axis, Dense()), pictures, epochs=1, samples=1, progress=False)
    assert fast.net.places == [Place("", "last", 1, 6, 1, False, True)]
    assert fast.predict(pictures[:3]).epistemic.shape == (3, 5, 5)  # type: ignore[attr-defined]
    fast = distil(teacher(axis, Dense(2)), pictures, epochs=1, samples=1, copies=0, progress=False)
    assert fast.net.places == [Place("", None, -1, 3, 1, False, True)]
    words = torch.randint(7, (N, 6))
    fast = distil(teacher(ibnn.Categorical(axis=-1), Tokens()), words, epochs=1, samples=1, progress=False)
    assert fast.net.places == [Place("", "last", -1, 8, 1, False, False)]  # log_softmax comes after it
    assert fast.predict(words[:2]).probs.shape == (2, 6, 3)  # type: ignore[attr-defined]


def test_several_heads(tmp_path: Path) -> None:
    likelihood = ibnn.Heads({"kind": ibnn.Categorical(), "size": ibnn.Gaussian()})
    fast = student(teacher(likelihood, TwoHeads()))
    assert [place.layer for place in fast.net.places] == ["kind", "size"]
    p: Any = fast.predict(rows(5))
    assert p["kind"].probs.shape == (5, 3)
    assert p["size"].epistemic.shape == (5,)
    assert set(fast.report) == {"kind", "size"}
    fast.save_pretrained(tmp_path)
    again: Any = ibnn.load(tmp_path, TwoHeads())
    assert torch.equal(again.predict(rows(5))["size"].mean, p["size"].mean)


def test_other_methods_novelty_and_loaders() -> None:
    torch.manual_seed(0)
    model = MCDropout(nets.mlp(D, 3, hidden=16), rate=0.3).eval()
    data = torch.utils.data.TensorDataset(rows(), torch.zeros(N))
    fast = distil(model, data, epochs=2, samples=4, progress=False, whole=True)
    again = distil(model, torch.utils.data.DataLoader(data, 50), epochs=2, samples=4, progress=False, whole=True)
    assert torch.equal(fast.predict(rows(9)).probs, again.predict(rows(9)).probs)  # type: ignore[attr-defined]
    ibnn.fit_novelty(fast, rows(), rows(200, seed=4))
    p = fast.predict(torch.cat([rows(50, seed=5), rows(50, seed=5) * 20]))
    assert p.p_value is not None
    assert float(p.p_value[:50].mean()) > 0.3 > 0.05 > float(p.p_value[50:].mean())


def test_an_interrupted_distilling_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = teacher()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    answer = model.predict(rows(20)).probs  # type: ignore[attr-defined]

    def stop(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ibnn.one_pass._learn", stop)
    with pytest.raises(KeyboardInterrupt):
        student(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.predict(rows(20)).probs, answer)  # type: ignore[attr-defined]


def test_a_method_without_draws_is_refused() -> None:
    with pytest.raises(ValueError, match="SWAG draws once"):
        distil(SWAG(nets.mlp(D, 3)), rows())


def test_a_fallback_keeps_the_parts_of_one_pass() -> None:
    fast = student(teacher())
    ibnn.fit_novelty(fast, (rows(), torch.randint(3, (N,))), (rows(200, seed=4), torch.randint(3, (200,))))
    p: Any = fast.predict(rows(9) * 50, fallback=0.05)
    torch.testing.assert_close(p.total, torch.special.entr(p.probs).sum(-1), atol=1e-5, rtol=1e-4)
    assert p.between is None


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"x": rows(30)}, ValueError, "`x`"),
        ({"x": rows().fill_(float("nan"))}, ValueError, "`x`"),
        ({"x": torch.randn(N, D + 1)}, RuntimeError, "."),
        ({"model": Plain(nets.mlp(D, 3))}, ValueError, "`model`"),
        ({"model": nets.mlp(D, 3)}, TypeError, "`model`"),
        ({"copies": -1}, ValueError, "`copies`"),
        ({"lr": 0.0}, ValueError, "`lr`"),
    ],
)
def test_refusals_leave_the_model_alone(change: dict[str, Any], error: type[Exception], word: str) -> None:
    model = change.pop("model", None) or teacher()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises((error, ValueError), match=word):
        distil(model, change.pop("x", rows()), progress=False, **change)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
