"""Factors of single units, against products written out here."""

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import Windows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ibnn
from ibnn.budget import saved_bytes
from ibnn.draws import Draws
from ibnn.network import by_layer
from ibnn.noise import divide_noise, has_units, shares
from ibnn.normal import Space, address, normals, numbered_words, words
from ibnn.units import LONGEST, MIRRORED, POOL, Units, pool, windows

B, K = 4, 3


def make_net() -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Conv2d(8, 9, 3, padding=1), nn.Conv2d(9, 10, 3, stride=2)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(40, 3)).double()


def converted(net: nn.Module | None = None, draws: str = "both", **options: object) -> ibnn.IBNN:
    model = ibnn.convert(net or make_net(), **{"components": K, "seed": 5, "draws": draws, **options})
    model.set_posterior(unit_std=torch.arange(1.0, len(model.latents) + 1) / 4)
    return model


X = torch.randn(B, 8, 6, 6, generator=torch.Generator().manual_seed(1)).double()
Y = torch.tensor([0, 1, 2, 1])


def reference(model: ibnn.IBNN, x: Tensor, z: Tensor, at: Tensor) -> Tensor:
    """The network's output for one row, layer by layer, unit by unit."""
    conv1, _, conv2, _, _, linear = model.net
    for number, layer in enumerate((conv1, conv2)):
        part = by_layer(model, z)[number][2]
        noise = windows(at[number : number + 1], x.numel()).view(x.shape).double()
        factor = torch.stack([part[c] * (1 + model.unit_std[number] * noise[c]) for c in range(len(part))])
        x = F.conv2d((x * factor)[None], layer.weight, layer.bias, layer.stride, layer.padding)[0].relu()
    return F.linear(x.flatten() * by_layer(model, z)[2][2], linear.weight, linear.bias)


# ------------------------------------------------------------------------------------------------------- the noise


def test_the_pool_is_standard_normal_and_pinned() -> None:
    values, negatives = pool(torch.device("cpu")).double().split(POOL)
    assert torch.equal(negatives, -values)
    assert torch.equal(values[1024:2048].float(), normals(address(0, Space.POOL, 1), 1024)[0])
    assert abs(values.mean()) < 4 / math.sqrt(POOL)
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / POOL)
    for lag in (1, 7, 1024):
        assert abs((values[lag:] * values[:-lag]).mean()) < 4 / math.sqrt(POOL), lag
    assert [round(float(v), 4) for v in windows(torch.tensor([7]), 3)[0]] == [0.0072, 1.4614, 1.5388]  # for good


@pytest.mark.parametrize("entries", [1, 5, LONGEST, LONGEST + 3, 3 * LONGEST])
def test_a_window_depends_on_its_word_alone(entries: int) -> None:
    at = words(address(3, torch.arange(6)))
    rows = windows(at, entries)
    assert rows.shape == (6, entries)
    for number in (0, 4):
        assert torch.equal(rows[number], windows(at[number : number + 1], entries)[0])
    assert torch.equal(windows(at | MIRRORED, entries), -rows)
    if entries > LONGEST:  # blocks are windows of their own
        second = windows(numbered_words(at, 2)[:, 1], LONGEST)
        assert torch.equal(rows[:, LONGEST : 2 * LONGEST], second[:, : entries - LONGEST])
    if entries > 1:
        assert not any(torch.equal(rows[0], row) for row in rows[1:])


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 16, 3, 5), (2, 20, 7, 9), (3, 17, 2, 3, 2), (1, 17, 64, 64)])
def test_noise_does_not_depend_on_the_memory_format(shape: tuple[int, ...]) -> None:
    last = torch.zeros(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    entries = math.prod(shape[1:])
    ends = (0, POOL - min(entries, LONGEST) - shape[0])  # of the pool
    for first in (*ends, *(end + MIRRORED for end in ends)):
        units = Units(torch.tensor(0.3), first + torch.arange(shape[0]))
        found = units.noise(last)
        assert found.stride() == last.stride()
        assert torch.equal(found, units.noise(torch.zeros(shape)))


# ----------------------------------------------------------------------------------------------------- the network


def test_draws_are_those_written_out_and_do_not_depend_on_the_batch() -> None:
    model = converted()
    draws = model.draw_latents(2, 9)
    at = words(address(9, Space.PREDICT_UNITS, torch.arange(K)[:, None] // 2 * 2, torch.arange(2)))
    assert torch.equal(draws.words % MIRRORED, numbered_words(at, 3))
    assert torch.equal(draws.words // MIRRORED, torch.arange(K)[:, None, None].expand(K, 2, 3).flatten(0, 1) % 2)
    outputs = model.draw_logits(X, 2, 9)
    for j in range(2 * K):
        for row in range(B):
            assert torch.allclose(outputs[j, row], reference(model, X[row], draws.z[j], draws.words[j]))
    with torch.no_grad():
        for same in (model.draw_logits(X, 2, 9), model.draw_logits(X, 2, 9, batch_size=256)):
            assert torch.allclose(same, outputs)
        assert torch.allclose(model.draw_logits(X[2:3], 2, 9)[:, 0], outputs[:, 2])
        assert torch.allclose(model.draw_logits(X, 1, 9, first=1), outputs[1::2])


def test_training_gives_every_row_units_of_its_own() -> None:
    model = converted().train()
    gradients = []
    for own in (False, True):
        model.zero_grad()
        model.reseed(3)
        if own:
            loss = model.elbo(X, Y, n_data=50, samples=2).loss
        else:
            draws = model._training_draws(model.posterior(), B, samples=2)
            at = words(address(3, Space.TRAIN_UNITS, torch.arange(B), torch.arange(2)[:, None]))
            at = numbered_words(at, 3)
            assert torch.equal(draws.words, at)
            rows = [reference(model, X[r % B], draws.z[r], at[r]) for r in range(2 * B)]
            loss = F.cross_entropy(torch.stack(rows), Y.repeat(2)) + model.kl() / 50
        loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.net.parameters()])
    assert all(torch.allclose(*pair) for pair in zip(*gradients, strict=True))


def test_units_do_not_change_the_kl_and_priors_of_layers_do() -> None:
    model, channel = converted(), converted(draws="channel")
    assert torch.allclose(model.kl(), channel.kl())
    model.prior_factors.copy_(torch.tensor([0.5, 1.0, 2.0]))
    q, s = model.posterior(), model.prior_std * torch.tensor([0.5] * 8 + [1.0] * 9 + [2.0] * 40).double()
    by_hand = ((q.std**2 + (q.mean - 1) ** 2) / (2 * s**2) - 0.5 - (q.std / s).log()).sum(1).mean()
    assert torch.allclose(model.kl("components"), by_hand)


def test_linear_layers_and_channels_have_no_units() -> None:
    model, channel = converted(), converted(draws="channel")
    assert has_units(model).tolist() == [True, True, False]
    assert model.unit_std.tolist() == [0.25, 0.5, 0.0]
    assert channel.unit_std.tolist() == [0.0] * 3
    assert channel.draw_latents().words is None
    model.set_posterior(unit_std=0.0)
    assert torch.allclose(model.draw_logits(X, 2), channel.draw_logits(X, 2))


def test_no_noise_is_the_network_itself() -> None:
    net = make_net()
    model = converted(net)
    model.set_posterior(mean=1.0, std=0.0)
    assert torch.equal(model.draw_logits(X, 1)[0], net(X))
    assert not model.unit_std.any()
    with pytest.raises(ValueError, match="unit_std"):
        model.set_posterior(unit_std=-1.0)
    with pytest.raises(ValueError, match=r"draws.*channel, unit, both.*units.*Did you mean"):
        ibnn.convert(net, draws="units")


def test_windows_of_one_example_share_their_units() -> None:
    model = converted(Windows(8).double())
    x = torch.randn(B, 8, 6).double()
    outputs = model.draw_logits(x, 2, 0)
    assert model.unit_std[0] > 0
    with torch.no_grad():
        assert torch.allclose(model.draw_logits(x, 2, 0, batch_size=99), outputs)
        assert torch.allclose(model.draw_logits(x[1:2], 2, 0)[:, 0], outputs[:, 1])


def test_activations_that_are_kept_are_those_of_the_plain_network() -> None:
    plain, x = make_net(), X.repeat(8, 1, 1, 1).requires_grad_()
    model = converted(plain).train()
    own = [*model.parameters(), *plain.parameters(), x]
    with saved_bytes(own) as before:
        plain(x)
    with saved_bytes(own) as after:
        model(x)
    draws = 32 * 8 * (3 * model.nodes + 3 * 3)  # z, its noise and component, words
    assert before.bytes < after.bytes <= before.bytes + draws


def test_checkpointed_layers_find_their_units_again() -> None:
    gradients = []
    for again in (False, True):
        net = make_net()
        model = converted(net).train()
        if again:
            body, flatten, head = model.net[:4], model.net[4], model.net[5]
            kept = {"body": body, "flatten": flatten, "head": head}
            model.net.forward = lambda x, m=kept: m["head"](m["flatten"](checkpoint(m["body"], x, use_reentrant=False)))
        model.elbo(X, Y, n_data=10).loss.backward()
        gradients.append([parameter.grad for parameter in model.net.parameters()])
    assert all(torch.allclose(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("make", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_the_network_of_one_draw_has_fixed_factors(make: Callable[[nn.Module], nn.Module]) -> None:
    model = converted()
    outputs = model.draw_logits(X, 2)
    net = make(model.draw(1, 1))
    assert torch.allclose(net(X), outputs[3])
    assert torch.allclose(net(X[:1]), outputs[3, :1])
    assert not isinstance(net[5], ibnn.IBNN)
    exported = torch.export.export(net, (X,))
    assert torch.allclose(exported.module()(X), outputs[3])
    assert torch.allclose(model.component(1)(X), model.outputs(X, model.posterior().mean[1:2])[0])


def test_states_hold_the_noise_of_units(tmp_path: Path) -> None:
    model = converted(draws="both")
    with pytest.raises(ValueError, match=r"state_dict.*unit_std"):
        converted(draws="channel").load_state_dict(model.state_dict())
    model.prior_factors.fill_(0.5)
    model.save_pretrained(tmp_path)
    again = ibnn.load(tmp_path, make_net())
    assert again.draws == "both"
    assert torch.equal(again.draw_logits(X, 2), model.draw_logits(X, 2))
    assert again.prior_factors.tolist() == [0.5] * 3


@pytest.mark.parametrize("format", ["torch", pytest.param("onnx", marks=pytest.mark.slow)])
def test_exported_files_hold_the_factors(format: str, tmp_path: Path) -> None:
    model = converted(make_net().float())
    written = ibnn.export(model, X.float(), tmp_path / "file", samples=2, format=format)
    assert written.difference < 1e-5
    assert written.draw_bytes == 4 * 2 * K * (model.nodes + 8 * 36 + 9 * 36)


def test_a_compiled_network_draws_the_same() -> None:
    model = converted().eval()
    model.eval_samples = 2
    expected = model(X)
    ibnn.units._POOLS.clear()  # a graph can be the first that needs it
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(X), expected)
    assert type(pool(X.device)) is Tensor
    assert torch.allclose(model(X), expected)


def test_how_layers_share_the_noise() -> None:
    model = ibnn.convert(nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(8, 2)))
    latents = model.latents.values()
    assert shares(latents, "channel") == ([1e-3, 1.0, 1.0], [0.0, 0.0, 0.0])
    assert shares(latents, "unit") == ([1e-3, 1e-3, 1.0], [0.0, 1.0, 0.0])
    assert shares(latents, "both") == ([1e-3, 0.5, 1.0], [0.0, 1.0, 0.0])


def test_draws_may_bring_their_own_deviation() -> None:
    model = converted()
    draws = model.draw_latents(1)
    other = Draws(draws.z, draws.words, torch.tensor([0.9, 0.1, 0.0]))
    found = model.outputs(X, other)
    model.set_posterior(unit_std=torch.tensor([0.9, 0.1, 0.0]))
    assert torch.equal(found, model.outputs(X, draws))


@pytest.mark.parametrize("draws", ["channel", "both"])
def test_several_draws_for_each_row_are_those_one_at_a_time(draws: str) -> None:
    model, rows = converted(draws=draws), 3  # as many as the last layer has outputs
    z = torch.rand(2, rows, model.nodes).double()
    at = words(address(0, torch.arange(2 * rows * 3))).view(2, rows, 3) if draws == "both" else None
    with torch.no_grad():
        together = model.outputs(X[:rows], Draws(z, at))
        for j in range(2):
            alone = model.outputs(X[:rows], Draws(z[j : j + 1], None if at is None else at[j : j + 1]))
            assert torch.allclose(together[j], alone[0])


# ------------------------------------------------------------------------------- what a careful reader has found


def test_hooks_of_others_keep_inputs_that_do_not_change() -> None:
    model, kept, copies = converted(), [], []

    def note(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        kept.append(args[0])
        copies.append(args[0].clone())

    for layer in (model.net[0], model.net[2]):
        layer.register_forward_hook(note)
    with torch.no_grad():
        model.draw_logits(X, 3)
    assert len(kept) == 2 * 3 * K
    assert all(torch.equal(*pair) for pair in zip(kept, copies, strict=True))


class Skip(nn.Conv2d):
    """A convolution that in eval mode returns its input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.training else input


class Around(nn.Module):
    """Uses such an input after another convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.skip, self.conv = Skip(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.skip(x)
        return (self.conv(x) + x).mean((2, 3))


@pytest.mark.parametrize("draws", ["channel", "both"])
def test_layers_that_return_their_input_keep_their_memory(draws: str) -> None:
    model = converted(Around().double(), draws=draws).eval()
    expected = model.draw_logits(X, 2)
    with torch.no_grad():
        assert torch.allclose(model.draw_logits(X, 2), expected)


def test_the_network_of_one_draw_is_an_ordinary_module() -> None:
    model = converted()
    first, second = model.draw(0), model.draw(0)
    with torch.inference_mode():
        first(X)
    first(X.clone().requires_grad_()).sum().backward()
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(X), first(X))
    layer = first[0]
    assert torch.equal(layer(input=X), layer(X))


def test_the_pool_is_never_a_fake() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ibnn import units

    units._POOLS.clear()
    with FakeTensorMode():
        windows(torch.tensor([7]), 3)
    units._POOLS.clear()
    with torch.device("meta"):
        found = windows(torch.tensor([7], device="cpu"), 3)
    assert [round(float(v), 4) for v in found[0]] == [0.0072, 1.4614, 1.5388]


def test_a_network_of_few_channels_alone_has_noise() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3), nn.Flatten())
    model = ibnn.convert(net, draws="both", seed=0)
    assert divide_noise(model).tolist() == [0.0, 0.0]
    assert model.prior_factors.tolist() == [1.0, 1.0]


def test_deviations_of_units_are_checked_before_anything_changes() -> None:
    model = converted()
    before = model.posterior().mean.clone()
    with pytest.raises(ValueError, match="`unit_std`"):
        model.set_posterior(mean=2.0, unit_std=torch.ones(7))
    assert torch.equal(model.posterior().mean, before)


def test_deviations_may_change_between_the_passes() -> None:
    model = converted().train()
    loss = model.elbo(X, Y, n_data=9).loss
    model.set_posterior(unit_std=0.1)
    loss.backward()
