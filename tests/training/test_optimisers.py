import pytest
import torch
from torch import nn

import ibnn
from ibnn import Recipe, Schedule
from ibnn.baselines import Plain
from ibnn.training.engine import make_optimisers, rates_at, set_rates


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
    recipe = Recipe(
        lr=0.1, latent_lr=0.5, noise_lr=0.4, schedule=Schedule(kind="linear", start=0.0, end=1.0, final=0.0)
    )
    rates = rates_at(0.25, recipe)
    assert rates == pytest.approx({"lr": 0.075, "latent_lr": 0.5})
    optimisers = make_optimisers(make(), recipe)
    set_rates(optimisers, rates, recipe)
    found = {group["name"]: group["lr"] for optimiser in optimisers for group in optimiser.param_groups}
    assert found == pytest.approx({"weights": 0.075, "likelihood": 0.3, "latents": 0.5})


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
