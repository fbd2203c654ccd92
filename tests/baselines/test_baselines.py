"""One contract for every method, then what is particular to each."""

import copy
import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference import check_split, entropy_split
from torch import Tensor, nn

import ibnn
from ibnn.baselines import SWAG, Ensemble, MCDropout, MeanField, Plain, scale_temperature
from ibnn.training.loop import fit
from ibnn.training.trainable import Trainable

N, D, C = 64, 5, 3


def make_net(seed: int = 0, *, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    middle = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.ReLU(), *middle, nn.Linear(8, C))


def make_data(seed: int = 0, n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=generator)
    return x, (x[:, :C] + 0.5 * torch.randn(n, C, generator=generator)).argmax(1)


METHODS: dict[str, Callable[[], Trainable]] = {
    "plain": lambda: Plain(make_net()),
    "dropout": lambda: MCDropout(make_net(), rate=0.3),
    "own dropout": lambda: MCDropout(make_net(dropout=0.3)),
    "vi": lambda: MeanField(make_net(), prior_std=1.0, init_std=0.05),
    "ensemble": lambda: Ensemble([make_net(0), make_net(1)]),
    "swag": lambda: SWAG(make_net(), rank=3),
    "ibnn": lambda: ibnn.convert(make_net(), components=2, prior_std=0.3),
}
STEPS = {"epochs": 4, "batch_size": 16, "quiet": True, "beta": 1.0}


def trained(name: str, **changes: object) -> Trainable:
    """A copy of a model, which is trained once."""
    return copy.deepcopy(_trained(name, *changes.items()))


@functools.cache
def _trained(name: str, *changes: tuple[str, object]) -> Trainable:
    model = METHODS[name]()
    swa = {"swa": 0.3} if name == "swag" else {}
    fit(model, make_data(), **(STEPS | swa | dict(changes)))  # type: ignore[arg-type]
    return model


@pytest.fixture(params=METHODS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ------------------------------------------------------------------------------------------------------- the contract


def test_draws_are_functions_whatever_the_batch_and_their_number(name: str) -> None:
    model, (x, _) = trained(name), make_data(1)
    draws = model.draw_logits(x, 3, 7)
    assert draws.shape[1:] == (N, C)
    assert draws.shape[0] % model.components == 0
    torch.testing.assert_close(model.draw_logits(x[20:30], 3, 7), draws[:, 20:30])
    fewer = model.draw_logits(x, 2, 7).unflatten(0, (model.components, -1))
    torch.testing.assert_close(fewer, draws.unflatten(0, (model.components, -1))[:, : fewer.shape[1]])
    torch.testing.assert_close(model.draw_logits(x, 3, 7), draws)


def test_seeds_give_different_draws_where_there_is_noise(name: str) -> None:
    model, (x, _) = trained(name), make_data(1)
    same = torch.equal(model.draw_logits(x, 2, 0), model.draw_logits(x, 2, 1))
    assert same == (name in ("plain", "ensemble"))


def test_prediction_changes_nothing_and_leaves_the_mode(name: str) -> None:
    model, (x, _) = trained(name), make_data(1)
    model.train()
    before = copy.deepcopy(model.state_dict())
    whole, parts = model.predict(x, samples=2), model.predict(x, samples=2, batch_size=10)
    assert model.training
    assert all(module.training for module in model.net.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    torch.testing.assert_close(whole.probs, parts.probs)  # type: ignore[attr-defined]
    draws = model.draw_logits(x, 2, 0).unflatten(0, (model.components, -1))
    check_split(whole, entropy_split(draws))


def test_a_call_works_in_both_modes(name: str) -> None:
    model, (x, _) = METHODS[name](), make_data()
    assert model.train()(x).shape == (N, C)
    first = model.eval()(x)
    assert first.shape == (N, C)
    assert torch.equal(first, model(x))


def test_loss_is_nll_plus_kl_over_the_training_set(name: str) -> None:
    model, (x, y) = METHODS[name](), make_data()
    terms = model.elbo(x, y, n_data=1000, beta=0.5)
    torch.testing.assert_close(terms.loss, terms.nll + 0.5 * terms.kl / 1000)
    if name not in ("vi", "ibnn"):
        assert terms.kl == 0


def test_every_parameter_is_trained(name: str) -> None:
    model, (x, y) = METHODS[name](), make_data()
    model.train().elbo(x, y, n_data=N).loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    groups = model.parameter_groups(0.1, 0.2, weight_decay=0.3)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert {group["name"]: group["lr"] for group in groups}.get("latents", 0.2) == 0.2


def test_learns_more_than_chance(name: str) -> None:
    model, (x, y) = trained(name, epochs=30, lr=0.02), make_data(1, 500)
    score = model.likelihood.score(model.predict(x, samples=10), y)
    assert score["nll"] < 0.8 * math.log(C)


def test_weights_keep_their_names(name: str) -> None:
    keys = set(make_net().state_dict())
    prefix = "members.0.net." if name == "ensemble" else "net."
    own = {key.removeprefix(prefix) for key in METHODS[name]().state_dict()}
    assert keys <= own or name == "own dropout"  # there a layer more stands in the Sequential


def test_state_goes_to_a_new_instance(name: str) -> None:
    model, (x, _) = trained(name), make_data(1)
    other = METHODS[name]()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval().draw_logits(x, 2, 0), model.draw_logits(x, 2, 0))


def test_stopped_training_goes_on_exactly(name: str, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(row: dict[str, object], _: object) -> None:
        if row["epoch"] == 2:
            raise Stop

    model, swa = METHODS[name](), {"swa": 0.3} if name == "swag" else {}
    options = STEPS | swa | {"run_dir": tmp_path, "checkpoint_every": 1}
    with pytest.raises(Stop):
        fit(model, make_data(), callbacks=[stop], **options)  # type: ignore[arg-type]
    again = METHODS[name]()
    fit(again, make_data(), **options)  # type: ignore[arg-type]
    whole = trained(name, checkpoint_every=1).state_dict()
    assert all(torch.equal(value, whole[key]) for key, value in again.state_dict().items())


def test_temperature_scaling_finds_the_lowest_cost(name: str) -> None:
    model = trained(name, epochs=30, lr=0.02)
    x, y = make_data(2, 200)
    found = scale_temperature(model, (x, y), samples=4)
    assert float(model.likelihood.temperature) == pytest.approx(found)
    draws = model.draw_logits(x, 4, 0).double()

    def nll(temperature: float) -> float:
        price = 5 * abs(math.log(temperature)) / len(y)
        return F.nll_loss((draws / temperature).softmax(-1).mean(0).log(), y).item() + price

    logs = torch.linspace(math.log(1 / 3), math.log(20), 81).tolist()
    best = min(logs, key=lambda log: nll(math.exp(log)))
    near = torch.linspace(best - 0.06, best + 0.06, 61).clamp(logs[0], logs[-1]).exp().tolist()
    assert nll(found) == pytest.approx(min(map(nll, near)), abs=1e-6)


def test_a_recipe_for_latents_is_refused_for_baselines() -> None:
    with pytest.raises(ValueError, match="`calibrate`"):
        fit(Plain(make_net()), make_data(), epochs=1, calibrate=True, quiet=True)


# ------------------------------------------------------------------------------------------------------- MAP, ensembles


def test_plain_is_the_network_and_its_cross_entropy() -> None:
    net, (x, y) = make_net(), make_data()
    model = Plain(net)
    torch.testing.assert_close(model.elbo(x, y, n_data=N, samples=3).nll, F.cross_entropy(make_net()(x), y))
    assert torch.equal(model.draw_logits(x)[0], net.eval()(x))


def test_members_train_as_if_alone() -> None:
    """SGD, which shows any factor on the gradient."""
    options = {"optimiser": "sgd", "lr": 0.1, "clip": 0.0, "quiet": True, "epochs": 3, "batch_size": 16}
    both = Ensemble([make_net(0), make_net(1)])
    fit(both, make_data(), **options)  # type: ignore[arg-type]
    for seed, member in enumerate(both.net):
        alone = Plain(make_net(seed))
        fit(alone, make_data(), seed=seed, **options)  # type: ignore[arg-type]
        for mine, expected in zip(member.parameters(), alone.net.parameters(), strict=True):
            torch.testing.assert_close(mine, expected)


def test_members_are_components() -> None:
    members, (x, _) = [make_net(0), make_net(1), make_net(2)], make_data()
    model = Ensemble(members)
    probs = torch.stack([member.eval()(x).softmax(-1) for member in members])
    prediction = model.predict(x)
    torch.testing.assert_close(prediction.probs, probs.mean(0))  # type: ignore[attr-defined]
    assert bool((prediction.within.abs() < 1e-6).all())  # type: ignore[attr-defined]


@pytest.mark.parametrize("nets", [[make_net()], [make_net()] * 2])
def test_an_ensemble_needs_separate_members(nets: list[nn.Module]) -> None:
    with pytest.raises(ValueError, match="two or more separate networks"):
        Ensemble(nets)


class TwoHeads(nn.Module):
    """Two outputs by name, behind a layer in common."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(D, 8), nn.Linear(8, C), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x).relu()
        return {"kind": self.kind(hidden), "size": self.size(hidden)}


@pytest.mark.parametrize(
    "make",
    [
        Plain,
        lambda net, likelihood: MCDropout(net, likelihood, rate=0.1),
        MeanField,
        lambda net, likelihood: Ensemble([net, TwoHeads()], likelihood),
        lambda net, likelihood: SWAG(net, likelihood, rank=2),
    ],
)
def test_baselines_have_several_heads(make: Callable[..., Plain]) -> None:
    x, labels = make_data()
    y = {"kind": labels, "size": x[:, :1]}
    model = make(TwoHeads(), ibnn.Heads({"kind": ibnn.Categorical(), "size": ibnn.Gaussian()}))
    history = fit(model, (x, y), (x, y), **(STEPS | {"swa": 0.5}))  # type: ignore[arg-type]
    assert {"valid_kind.error", "valid_size.rmse"} <= set(history.rows[-1])
    before = model.likelihood.score(model.predict(x), y)["nll"]
    assert scale_temperature(model, (x, y)) == model.likelihood.temperature
    assert model.likelihood.score(model.predict(x), y)["nll"] < before + 1e-6
    outputs = model.eval()(x)
    assert {name: tuple(output.shape) for name, output in outputs.items()} == {"kind": (N, C), "size": (N, 1)}


# ----------------------------------------------------------------------------------------------------------- MC-dropout


def test_dropout_of_a_linear_network_has_the_moments_of_its_masks() -> None:
    """y = Σ wᵢ xᵢ mᵢ/(1 − r): mean w·x, variance r/(1 − r) Σ wᵢ² xᵢ²."""
    torch.manual_seed(0)
    net, rate, draws = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)), 0.25, 1_500
    x = torch.randn(1, 4)
    outputs = MCDropout(net, ibnn.Gaussian(), rate=rate).draw_logits(x, draws, 0).flatten().detach().double()
    hidden, weight = net[0](x).flatten().double(), net[1].weight.flatten().double()
    mean, variance = (hidden * weight).sum(), rate / (1 - rate) * (hidden * weight).square().sum()
    assert abs(outputs.mean() - mean) < 4 * (variance / draws).sqrt()
    fourth = (outputs - outputs.mean()).pow(4).mean()
    assert abs(outputs.var() - variance) < 4 * ((fourth - variance**2) / draws).sqrt()


def test_the_network_s_own_dropout_is_kept_or_replaced() -> None:
    own, given = MCDropout(make_net(dropout=0.4)), MCDropout(make_net(dropout=0.4), rate=0.1)
    assert own.net[3].own.p == 0.4
    assert given.net[3].own.p == 0.0
    assert given.net[4].input_dropout.own.p == 0.1
    with pytest.raises(ValueError, match="a network without dropout"):
        MCDropout(make_net())


@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_every_kind_of_dropout_is_drawn(kind: type[nn.Module]) -> None:
    """Inputs of 1 become one of two values, by channel or entry; the same for all rows, as often as torch's own."""
    dims, rate = {nn.Dropout1d: 1, nn.Dropout3d: 3}.get(kind, 2), 0.25
    x = torch.ones(2, 500, *[2] * dims)
    (draw,) = MCDropout(nn.Sequential(nn.Identity(), kind(rate), nn.Linear(2, 2)).eval()).net[1:2]
    with torch.no_grad():
        torch.manual_seed(0)
        kept, dropped = sorted(draw.own.train()(x).unique().tolist(), reverse=True)
        draw.source = torch.Generator().manual_seed(0)
        found = draw(x)
    assert torch.equal(found[0], found[1])
    values = found[0].flatten(1)
    torch.testing.assert_close(values.unique(), torch.tensor([dropped, kept]))
    by_channel = kind is not nn.AlphaDropout
    assert bool((values == values[:, :1]).all()) == by_channel
    count = 500 if by_channel else values.numel()
    share = (values < (kept + dropped) / 2).double().mean()
    assert abs(share - rate) < 4 * math.sqrt(rate * (1 - rate) / count)


def test_one_dropout_layer_in_two_places_is_drawn_in_both() -> None:
    shared = nn.Dropout(0.5)
    method = MCDropout(nn.Sequential(nn.Linear(D, 50), shared, nn.Identity(), shared))
    outputs = method.draw_logits(make_data()[0], 200, 0)
    dropped = (outputs == 0).double().mean()
    assert abs(dropped - 0.75) < 4 * math.sqrt(0.75 * 0.25 / (200 * 50))  # by one of two masks


def test_attention_keeps_its_own_dropout_rate() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    method = MCDropout(nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 2)), rate=0.5)
    assert layer.self_attn.dropout == 0.0
    draws = method.draw_logits(torch.randn(4, 3, 8), 2)
    assert draws.shape == (2, 4, 2)
    assert not torch.equal(draws[0], draws[1])


# --------------------------------------------------------------------------------------------------------------- BNN-VI


def test_kl_is_that_of_the_gaussians() -> None:
    model = MeanField(make_net(), prior_std=0.2, init_std=0.03)
    prior = torch.distributions.Normal(0.0, 0.2)
    expected = sum(
        torch.distributions.kl_divergence(torch.distributions.Normal(mean, std), prior).sum()
        for mean, std in model.posterior().values()
    )
    torch.testing.assert_close(model.kl(), expected)
    assert len(model.stochastic) == 4  # two layers, weight and bias: BatchNorm's are not random


def test_small_noise_leaves_a_trained_network_as_it_is() -> None:
    net, (x, _) = make_net().eval(), make_data()
    expected = net(x)
    torch.testing.assert_close(MeanField(net, init_std=1e-7).draw_logits(x, 2)[1], expected)


def test_draws_of_a_linear_layer_have_closed_moments() -> None:
    net, x = nn.Linear(3, 10), torch.tensor([[1.0, -2.0, 0.5]])
    model = MeanField(net, ibnn.Gaussian(), init_std=0.3)
    noise = (model.draw_logits(x, 400, 3) - net(x)).flatten().detach()  # outputs have weights of their own
    variance = 0.3**2 * (x.square().sum() + 1)  # the bias too
    assert abs(noise.mean()) < 4 * (variance / 4000).sqrt()
    assert abs(noise.var() / variance - 1) < 4 * (2 / 4000) ** 0.5


def test_without_data_the_posterior_goes_to_the_prior() -> None:
    model = MeanField(nn.Linear(3, 2), prior_std=0.2, init_std=0.01)
    optimiser = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(400):
        optimiser.zero_grad()
        model.kl().backward()
        optimiser.step()
    assert model.kl().item() < 1e-3
    assert all(torch.allclose(std, torch.tensor(0.2), atol=1e-2) for _, std in model.posterior().values())


def test_means_do_not_decay_twice() -> None:
    groups = MeanField(make_net()).parameter_groups(0.1, weight_decay=0.3)
    decays = {sum(p.numel() for p in group["params"]): group["weight_decay"] for group in groups}
    assert decays == {75: 0.0, 16: 0.3, 2 * 75 - 75: 0.0}  # layers, BatchNorm, ρ


# --------------------------------------------------------------------------------------------------------- SWA and SWAG


def collected(model: SWAG, count: int) -> Tensor:
    path = []
    for step in range(count):
        with torch.no_grad():
            for p in model.net.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(step)))
        path.append(torch.cat([p.detach().flatten() for p in model.net.parameters()]))
        model.collect()
    return torch.stack(path)


def test_moments_of_the_path() -> None:
    model = SWAG(make_net(), rank=3)
    path = collected(model, 5)
    torch.testing.assert_close(model.mean, path.mean(0))
    torch.testing.assert_close(model.square, path.square().mean(0))
    expected = {tuple((path[i] - path[: i + 1].mean(0))[:3].tolist()) for i in (2, 3, 4)}
    got = {tuple(row[:3].tolist()) for row in model.deviations}
    assert {tuple(round(v, 4) for v in row) for row in got} == {tuple(round(v, 4) for v in row) for row in expected}
    model.end_epoch(collect=False, last=True)
    torch.testing.assert_close(torch.cat([p.flatten() for p in model.net.parameters()]), path.mean(0))


def test_draws_have_swag_s_covariance() -> None:
    model = SWAG(nn.Linear(2, 1, bias=False), ibnn.Gaussian(), rank=4)
    path = collected(model, 4)
    draws = 2_000
    weights = model.draw_logits(torch.eye(2), draws, 0).squeeze(-1).detach()  # (J, 2): the weights themselves
    deviations = torch.stack([path[i] - path[: i + 1].mean(0) for i in range(4)])
    covariance = 0.5 * torch.diag(path.var(0, correction=0)) + deviations.T @ deviations / (2 * 3)
    assert bool(((weights.mean(0) - path.mean(0)).abs() < 4 * (covariance.diag() / draws).sqrt()).all())
    spread = (covariance.diag()[:, None] * covariance.diag() + covariance**2).sqrt()
    assert bool(((weights.T.cov() - covariance).abs() < 4 * spread / draws**0.5).all())


def test_swa_is_the_mean_of_the_last_epochs() -> None:
    seen: list[Tensor] = []

    def keep(row: dict[str, object], model: Trainable) -> None:
        seen.append(model.net[0].weight.detach().clone())

    plain, swag = Plain(make_net()), SWAG(make_net())
    fit(Plain(make_net()), make_data(), callbacks=[keep], **STEPS)  # type: ignore[arg-type]
    for model in (plain, swag):
        fit(model, make_data(), swa=0.5, **STEPS)  # type: ignore[arg-type]
        torch.testing.assert_close(model.net[0].weight.detach(), torch.stack(seen[2:]).mean(0))
    assert torch.equal(plain.net[1].running_mean, swag.net[1].running_mean)  # both estimated anew
    assert int(swag.count) == 2


class Attention(nn.Module):
    """Reads the rate of its dropout layer, as the attention of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 3), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)[:, None, None]
        p = self.dropout.p if self.training else 0.0
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=p)[:, 0, 0]


@pytest.mark.parametrize(("rate", "read"), [(None, 0.1), (0.2, 0.0)])
def test_networks_may_read_the_rate_of_their_dropout(rate: float | None, read: float) -> None:
    net = Attention()
    model = MCDropout(net, rate=rate)
    assert net.dropout.p == read  # with a rate of ours the network's own dropout is off
    model.train().elbo(torch.ones(2, 4), torch.tensor([0, 1]), n_data=2).loss.backward()
