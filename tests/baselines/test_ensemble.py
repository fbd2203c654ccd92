"""Ensembles of any method: mixtures by hand, files, resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ibnn
from ibnn import nets
from ibnn.baselines import Ensemble, MCDropout, Plain, scale_temperature

D, KINDS = 4, ("categorical", "bernoulli", "gaussian")


def net() -> nn.Module:
    return nets.mlp(D, 3, hidden=8)


def rows(n: int = 40, seed: int = 0) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed))


def member(seed: int, kind: Any = "categorical") -> ibnn.IBNN:
    torch.manual_seed(seed)
    model = ibnn.convert(net(), components=2, seed=seed, likelihood=kind).eval()
    model.set_posterior(std=0.4)
    model.likelihood.set_temperature(1.0 + 0.5 * seed)
    if kind == "gaussian":
        model.likelihood.log_std.data.fill_(-0.3 * seed)  # type: ignore[union-attr, operator]
    return model


def entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)


def test_an_answer_is_the_mixture_of_the_members_own() -> None:
    members = [member(seed) for seed in range(3)]
    model, x = Ensemble(members), rows()
    p: Any = model.predict(x, samples=3)
    draws = ibnn.draws(model, x, samples=3)  # (3, 2 · 3, B, C)
    assert draws.shape == (3, 6, len(x), 3)
    probs = draws.softmax(-1)
    torch.testing.assert_close(p.probs, probs.mean((0, 1)))
    torch.testing.assert_close(p.aleatoric, entropy(probs).mean((0, 1)))
    torch.testing.assert_close(p.between, entropy(probs.mean((0, 1))) - entropy(probs.mean(1)).mean(0))
    torch.testing.assert_close(p.total, entropy(p.probs))
    raw = members[2].draw_logits(x, 3, ibnn.normal.numbered_seed(0, 2))
    torch.testing.assert_close(draws[2], raw / 2.0)  # at its own temperature


def test_without_noise_between_is_the_mutual_information_of_the_means() -> None:
    members = [member(seed) for seed in range(2)]
    for own in members:
        own.set_posterior(mean=own.posterior().mean.mean(0), std=0.0)
        own.likelihood.set_temperature(1.0)
    x = rows()
    p: Any = Ensemble(members).predict(x)
    probs = torch.stack([own.mean_output(x).softmax(-1) for own in members])
    torch.testing.assert_close(p.between, entropy(probs.mean(0)) - entropy(probs).mean(0), atol=1e-6, rtol=1e-4)
    assert float(p.within.max()) < 1e-5


def test_numbers_keep_the_members_noise() -> None:
    members = [member(seed, "gaussian") for seed in range(2)]
    p: Any = Ensemble(members).predict(rows())
    own = [m.likelihood.split(torch.zeros(1, 3))[1][0, 0].square() for m in members]  # type: ignore[operator, union-attr]
    torch.testing.assert_close(p.aleatoric, (sum(own) / 2).expand_as(p.aleatoric))
    means = ibnn.draws(Ensemble(members), rows(), samples=5)[..., 0]
    torch.testing.assert_close(p.mean, means.mean((0, 1)))
    torch.testing.assert_close(p.between, means.mean(1).var(0, correction=0))


@pytest.mark.parametrize(
    "kind", [*list(KINDS)[:1], *(pytest.param(k, marks=pytest.mark.slow) for k in list(KINDS)[1:])]
)
def test_files_and_exports_give_the_same_answers(kind: str, tmp_path: Path) -> None:
    model, x = Ensemble([member(seed, kind) for seed in range(2)]), rows(150)
    model.likelihood.set_temperature(1.3)
    ibnn.fit_novelty(model, x, rows(120, seed=1))
    model.save_pretrained(tmp_path)
    again: Any = ibnn.load(tmp_path, net())
    p, q = model.predict(x), again.predict(x)
    assert p.p_value is not None
    for name in ("aleatoric", "between", "within", "p_value"):
        assert torch.equal(getattr(p, name), getattr(q, name))
    written = ibnn.export(model, x[:2], tmp_path / "all.pt2", format="torch", samples=2)
    answers = torch.export.load(written.path).module()(x)
    expected: Any = model.predict(x, samples=2)
    torch.testing.assert_close(answers["epistemic"], expected.epistemic, atol=1e-5, rtol=1e-3)


def test_fit_trains_members_alone_and_resumes(tmp_path: Path) -> None:
    x, y = rows(600), torch.randint(3, (600,), generator=torch.Generator().manual_seed(0))
    options: Any = {"epochs": 2, "quiet": True, "seed": 3, "novelty": False}
    valid = (x[:120], y[:120])

    def made() -> Ensemble:
        return Ensemble([member(seed) for seed in range(2)])

    model, alone = made(), member(1)
    history = ibnn.fit(model, (x, y), valid, **options)  # type: ignore[arg-type]
    ibnn.fit(alone, (x, y), valid, **options | {"seed": 4})
    assert torch.equal(model.members[1].posterior().mean, alone.posterior().mean)  # type: ignore[operator]
    assert {row["member"] for row in history.rows} == {0, 1}
    stopped = made()

    def stop(row: Any, own: Any) -> None:
        if own is stopped.members[1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ibnn.fit(stopped, (x, y), valid, run_dir=tmp_path, callbacks=[stop], evaluate_every=1, **options)  # type: ignore[arg-type]
    resumed = made()
    ibnn.fit(resumed, (x, y), valid, run_dir=tmp_path, evaluate_every=1, **options)  # type: ignore[arg-type]
    for name, value in resumed.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_one_temperature_and_one_student() -> None:
    x, model = rows(400), Ensemble([member(seed) for seed in range(2)])
    y = model.predict(x).labels  # type: ignore[attr-defined]
    before = [float(own.likelihood.temperature) for own in model.members]  # type: ignore[union-attr, arg-type]
    assert 0 < scale_temperature(model, (x, y)) < 1  # type: ignore[arg-type]
    assert before == [float(own.likelihood.temperature) for own in model.members]  # type: ignore[union-attr, arg-type]
    fast = ibnn.distil(model, x, epochs=2, samples=2, progress=False)
    assert not any(
        torch.equal(a, b) for a, b in zip(fast.net.net.parameters(), member(0).net.parameters(), strict=False)
    )
    assert fast.report[""].rows == 40


@pytest.mark.parametrize(
    "members",
    [[member(0)], [member(0)] * 2, [member(0), Plain(net())], [member(0), member(1, "gaussian")]],
)
def test_members_are_of_one_kind_and_apart(members: list[nn.Module]) -> None:
    with pytest.raises(ValueError, match="`members`"):
        Ensemble(members)


def test_dropout_networks() -> None:
    model = Ensemble([MCDropout(net(), rate=0.2) for _ in range(2)])
    assert ibnn.draws(model, rows(), samples=3).shape == (2, 3, 40, 3)
