from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ibnn
from ibnn import Recipe, Schedule
from ibnn.baselines import Plain
from ibnn.training.engine import make_optimisers, set_rates


def make(**options: object) -> ibnn.IBNN:
    return ibnn.convert(nn.Linear(3, 1), components=4, likelihood="gaussian", seed=0, **options)  # type: ignore[arg-type]


def test_weights_and_latents_have_an_optimiser_each() -> None:
    model = make()
    recipe = Recipe(optimiser="sgd", lr=0.1, latent_lr=0.5, weight_decay=0.2, momentum=0.7)
    weights, latents = make_optimisers(model, recipe)
    assert (type(weights), type(latents)) == (torch.optim.SGD, torch.optim.AdamW)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in weights.param_groups] == [
        ("weights", 0.1, 0.2),
        ("likelihood", 0.1, 0.0),
    ]
    assert [(g["momentum"], g["nesterov"]) for g in weights.param_groups] == [(0.7, True)] * 2
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in latents.param_groups] == [("latents", 0.5, 0.0)]
    assert model.gradient_scale == 4
    assert make_optimisers(model, recipe.but(undo_k=False))
    assert model.gradient_scale == 1
    assert len(make_optimisers(Plain(nn.Linear(2, 2)), recipe)) == 1


def test_rates_follow_their_schedules_and_noise_its_own_factor() -> None:
    recipe = Recipe(lr=0.01, latent_lr=0.5, schedule=Schedule(kind="linear", start=0.0, end=1.0, final=0.0))
    rows = ibnn.fit(
        make(), (torch.randn(8, 3), torch.zeros(8, 1)), recipe=recipe.but(steps=2, beta=1.0), quiet=True
    ).rows
    assert [row["lr"] for row in rows] == pytest.approx([0.0075, 0.0025])
    assert [row["latent_lr"] for row in rows] == [0.5, 0.5]
    optimisers = make_optimisers(make(), recipe)
    set_rates(optimisers, {"lr": 0.0075, "latent_lr": 0.5}, recipe)
    found = {group["name"]: group["lr"] for optimiser in optimisers for group in optimiser.param_groups}
    assert found == pytest.approx({"weights": 0.0075, "likelihood": 0.015, "latents": 0.5})


def test_updates_in_one_pass_are_those_of_torch_s_loop() -> None:
    ended = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = make()
        optimisers = make_optimisers(model, Recipe(weight_decay=0.1))
        assert {o.defaults["fused"] for o in optimisers} == {True}
        if not fused:
            optimisers = [torch.optim.AdamW(o.param_groups, foreach=False) for o in optimisers]
            for group in (group for optimiser in optimisers for group in optimiser.param_groups):
                group |= {"fused": False}
        x, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 1)
        for _ in range(20):
            model.elbo(x, y, n_data=8).loss.backward()
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad()
        ended.append(model.state_dict())
    for name, value in ended[0].items():
        torch.testing.assert_close(value, ended[1][name], rtol=1e-5, atol=1e-6)


class Halving(torch.optim.SGD):
    """An optimiser of one's own, with a plain number in its state."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1


X, Y = torch.randn(96, 4, generator=torch.Generator().manual_seed(0)), torch.arange(96) % 3


def trained(folder: Path | None = None, stop: int = 0, **options: Any) -> ibnn.IBNN:
    """Trains for twelve steps; `stop` interrupts it first, after as many evaluations."""
    torch.manual_seed(0)
    model = ibnn.convert(nn.Linear(4, 3), components=2, seed=0)

    def interrupt(row: dict[str, Any], model: Any) -> None:
        if row["epoch"] == stop:
            raise KeyboardInterrupt

    fixed: dict[str, Any] = {"epochs": 4, "batch_size": 32, "beta": 1.0, "quiet": True, "run_dir": folder}
    if stop:
        with pytest.raises(KeyboardInterrupt):
            ibnn.fit(model, (X, Y), **fixed, callbacks=[interrupt], checkpoint_every=2, **options)
        return trained(folder, **options, checkpoint_every=2)
    model.history = ibnn.fit(model, (X, Y), **fixed, **options)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("optimiser", "name"),
    [
        (torch.optim.RMSprop, "RMSprop"),
        ("NAdam", "NAdam"),
        (Halving, f"{__name__}:Halving"),
        ("Adafactor", "Adafactor"),
    ],
)
def test_any_optimiser_is_kept_by_name_and_resumed_exactly(optimiser: Any, name: str, tmp_path: Path) -> None:
    recipe = Recipe(optimiser=optimiser, latent_optimiser=optimiser)
    assert recipe.optimiser == name
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    found = trained(tmp_path, stop=3, optimiser=optimiser)
    expected = trained(optimiser=name, checkpoint_every=2)
    for key, value in expected.state_dict().items():
        assert torch.equal(value, found.state_dict()[key]), key
    assert not torch.equal(found.net.weight, trained().net.weight)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.optim.LBFGS, "closure"),
        ("LBFGS", "closure"),
        ("rmsprop", "Did you mean 'RMSprop'"),
        ("lr_scheduler", "torch.optim"),
        (nn.Linear, "torch.optim"),
        (3, "string"),
    ],
)
def test_optimisers_that_cannot_train(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"`optimiser`.*{words}"):
        Recipe(optimiser=value)
    with pytest.raises(ImportError, match="nowhere"):
        Recipe(optimiser="nowhere:Class")


def test_schedules_by_name() -> None:
    for kind in ("constant", "linear", "cosine"):
        recipe = Recipe(schedule=kind, latent_schedule=kind)
        assert recipe.schedule == recipe.latent_schedule == Schedule(kind=kind, start=0.0, end=1.0)  # type: ignore[arg-type]
        assert Recipe.from_toml(f"schedule = '{kind}'").schedule == recipe.schedule
    with pytest.raises(ValueError, match=r"`schedule.kind`.*'cosin'"):
        Recipe(schedule="cosin")
    assert trained(schedule="constant").history["lr"] == [1e-3] * 4  # type: ignore[attr-defined]


def one_cycle(optimiser: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=0.1, total_steps=12)


def test_a_scheduler_is_traced_before_training(tmp_path: Path) -> None:
    optimiser = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler, rates = one_cycle(optimiser), []
    for _ in range(12):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    expected = trained(scheduler=one_cycle, checkpoint_every=2)
    assert expected.history["lr"] == pytest.approx(rates[2::3])  # type: ignore[attr-defined]
    assert expected.history["latent_lr"] == [1e-2] * 4  # type: ignore[attr-defined]
    found = trained(tmp_path, stop=3, scheduler=one_cycle)
    assert torch.equal(found.net.weight, expected.net.weight)
    with pytest.raises(ValueError, match="scheduler"):
        trained(tmp_path, checkpoint_every=2)


def test_schedulers_that_cannot_be_traced() -> None:
    with pytest.raises(TypeError, match=r"`scheduler`.*ReduceLROnPlateau"):
        trained(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(TypeError, match="`scheduler`"):
        trained(scheduler=lambda optimiser: 0.1)
