"""Pruning: scores against finite differences, what is cut, what is carried over, and what is refused."""

from pathlib import Path

import pytest
import torch
from prunable import Joined, Mobile, Residual, X, model_of
from safetensors.torch import load_file
from torch import Tensor, nn

import ibnn
from ibnn.draws import Draw
from ibnn.network import mean_latents
from ibnn.pruning import pruning, rebuild
from ibnn.pruning.channels import find_channels
from ibnn.pruning.cutting import choose
from ibnn.pruning.scores import sensitivities

Y = torch.tensor([0, 1, 2, 0])


def test_sensitivities_equal_finite_differences() -> None:
    torch.manual_seed(0)
    model, x = model_of(Mobile().double()), X.double()  # no ties of a max-pool, where slopes jump
    groups = torch.arange(model.nodes) // 3  # channels of three nodes; the last nodes are of none
    z, channels = 1 + 0.2 * torch.randn(4, model.nodes).double(), int(groups.max())
    mask = (torch.rand(4, channels) < 0.7).double()
    part = torch.rand(model.nodes).double()
    found = sensitivities(model, x, Y, Draw(z), groups, mask, part)

    def losses(step: Tensor) -> Tensor:
        factors = torch.cat([mask, torch.ones(4, 1).double()], 1)[:, groups]
        factors = factors + part * torch.cat([step, torch.zeros(1).double()])[groups]
        with torch.no_grad():
            return nn.functional.cross_entropy(model.outputs(x, (z * factors)[None])[0], Y, reduction="none")

    step = 1e-5 * torch.eye(channels).double()
    slopes = torch.stack([(losses(s) - losses(-s)) / 2e-5 for s in step], 1)
    torch.testing.assert_close(found, slopes.square() / 2, rtol=1e-5, atol=1e-9)
    assert found.shape == (4, channels)
    assert bool((found > 0).any())


def test_zero_nodes_go_first_and_leave_no_trace() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():
        net[2].weight[:, ::2] = 0
    model = ibnn.convert(net, components=2, init_std=0.0, seed=0)
    x = torch.randn(60, 5)
    found = ibnn.prune(model, (x, torch.randint(3, (60,))), keep=0.5)
    assert torch.equal(found.net[0].weight, net[0].weight[1::2])
    torch.testing.assert_close(found.net(x), net(x), rtol=0, atol=1e-6)
    assert found.before == (147, 128, 21)
    assert found.after == (75, 64, 13)


def test_keep_one_returns_an_equal_model() -> None:
    model = model_of(Residual())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = ibnn.prune(model, (X, Y), keep=1)
    assert found.model is not model
    assert found.before == found.after
    for state in (found.model.state_dict(), model.state_dict()):
        assert all(torch.equal(state[name], value) for name, value in before.items())
    assert torch.equal(found.net(X), model.net(X))


@pytest.mark.parametrize("make", [Residual, Mobile, Joined])
@pytest.mark.parametrize("draws", ["channel", "both"])
def test_a_thinner_model_is_the_given_one_with_z_zero(
    make: type[nn.Module], draws: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "compensate", lambda *_: None)
    torch.manual_seed(0)
    model, generator = model_of(make(), draws=draws), torch.random.get_rng_state()
    model.likelihood.set_temperature(1.5)
    found = ibnn.prune(model, (X, Y), keep=0.5)
    thin, again = found.model, ibnn.prune(model, (X, Y), keep=0.5).model
    assert torch.equal(generator, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(thin.parameters(), again.parameters(), strict=True))
    assert 0.25 * found.before.products < found.after.products <= 0.5 * found.before.products
    rebuilt = rebuild(make(), found.net.state_dict()).eval()
    assert torch.equal(rebuilt(X), found.net(X))
    assert found.after.products == sum(layer.products for layer in find_channels(rebuilt, X).layers.values())
    assert float(thin.likelihood.temperature) == 1.5
    z = torch.zeros(model.nodes)
    at, places = mean_latents(model), 0
    for name, latent in model.latents.items():  # where each layer's remaining means were
        kept = thin.latents[name].mean
        rows = [next(i for i in range(latent.nodes) if torch.equal(latent.mean[:, i], column)) for column in kept.T]
        assert torch.equal(thin.latents[name].rho, latent.rho[:, rows])
        z[[places + row for row in rows]] = at[[places + row for row in rows]]
        places += latent.nodes
    with torch.no_grad():
        expected = model.outputs(X, z[None])[0]
        torch.testing.assert_close(thin.outputs(X, mean_latents(thin)[None])[0], expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(expected, model.outputs(X, at[None])[0])
    assert thin.predict(X).probs.shape == (4, 3)


def test_a_thinner_network_converts_trains_and_is_saved(tmp_path: Path) -> None:
    x, y = torch.randn(64, 1, 4, 4), torch.randint(3, (64,))
    found = ibnn.prune(model_of(Residual()), (x, y), 0.6, quiet=True)
    ibnn.fit(found.model, (x, y), (x, y), epochs=1, quiet=True, novelty=False)
    found.model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for net in (found.net, rebuild(Residual(), state)):
        assert torch.equal(ibnn.load(tmp_path, net).predict(x).probs, found.model.predict(x).probs)
    with pytest.raises(ValueError, match=r"without \['depth"):
        rebuild(Mobile(), state)
    assert ibnn.convert(found.net).nodes == found.model.nodes == found.after.nodes
    assert ibnn.prune(found.model, (x, y), keep=0.5).after.products <= found.after.products / 2
    assert f"-> {found.after.weights:,} (" in str(found)


def test_given_scores_are_ranked_as_they_are() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    model = ibnn.convert(net)
    scores = {"0": torch.zeros(3), "2": torch.tensor([5.0, 1, 7, 2, 8, 3, 6, 4])}
    found = ibnn.prune(model, (torch.randn(8, 3), torch.randint(2, (8,))), keep=0.5, by=scores)
    assert torch.equal(found.net[0].weight, net[0].weight[[0, 2, 4, 6]])


def test_no_more_is_cut_than_asked_for() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 2))
    channels = find_channels(net, torch.zeros(2, 3))  # 224 multiply–adds; 23 or 10 of them for each
    small, large = list(range(8, 28)), list(range(8))
    scores = {channel: float(number) for number, channel in enumerate([small[0], *large, *small[1:]])}
    assert choose(channels, scores, 224 - 23) == {large[0]}  # and the cheap one is put back
    with pytest.raises(ValueError, match=r"the least for this network.* 4 \(is the network's output\)"):
        choose(channels, scores, 1)


def test_layers_keep_multiples_of_a_block() -> None:
    net = nn.Sequential(nn.Linear(3, 21), nn.ReLU(), nn.Linear(21, 16), nn.ReLU(), nn.Linear(16, 2))
    channels = find_channels(net, torch.zeros(2, 3))  # 431 multiply–adds; 19 or 23 of them for each
    scores = {channel: float(channel) for channel in channels.cuttable}
    assert choose(channels, scores, 400, block=8) == {0, 1, 2, 3, 4}  # 21 → 16
    assert choose(channels, scores, 200, block=8) == set(range(13))  # → 8
    assert choose(channels, scores, 150, block=8) == {*range(13), *range(21, 29)}
    assert len(choose(channels, scores, 40, block=8)) > 21  # not possible in blocks


def test_a_part_that_fails_when_it_is_cut_is_left_whole() -> None:
    class Rigid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.two(self.one(x).view(-1, 8).relu()).relu() / 8**0.5)

    found = ibnn.prune(ibnn.convert(Rigid()), (torch.randn(9, 4), torch.arange(9) % 3), keep=0.7)
    one, two, _ = found.layers
    assert one.outputs == (8, 8)
    assert "RuntimeError" in one.whole or "the network fails" in one.whole
    assert two.outputs[1] < 8


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 0},
        {"keep": 1.5},
        {"keep": float("nan")},
        {"by": "magnitude"},
        {"by": {"first": torch.zeros(1)}},
        {"seed": -1},
    ],
)
def test_bad_arguments_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(options))}`"):
        ibnn.prune(model_of(Residual()), (X, Y), **options)


@pytest.mark.parametrize("options", [{"where": "output"}, {"where": "both"}, {"bias_latents": "layer"}])
def test_latents_elsewhere_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="one with latents on inputs alone"):
        ibnn.prune(model_of(Mobile(), **options), (X, Y))


def test_samples_of_latents_are_refused() -> None:
    model = ibnn.convert(nn.Linear(3, 3), components=2)
    model.set_bank(model.draw_latents(4).z.view(2, 4, 3))
    with pytest.raises(ValueError, match=r"set_posterior\(\)"):
        ibnn.prune(model, (torch.randn(4, 3), Y))


def test_grouped_convolutions_are_rebuilt_as_they_are() -> None:
    wide, thin = (
        nn.Sequential(
            nn.Conv2d(1, 8, 1), nn.Conv2d(8, 4, 1, groups=2), nn.Conv2d(4, features, 1), nn.Conv2d(features, 2, 1)
        )
        for features in (6, 3)
    )
    assert torch.equal(rebuild(wide, thin.state_dict())(X), thin(X))
    named = nn.ModuleDict({"net": nn.Linear(3, 2)})  # a name that models use, too
    assert rebuild(named, nn.ModuleDict({"net": nn.Linear(2, 2)}).state_dict())["net"].in_features == 2


def test_only_converted_networks_are_pruned() -> None:
    with pytest.raises(TypeError, match=r"ibnn\.convert"):
        ibnn.prune(Residual(), (X, Y))
