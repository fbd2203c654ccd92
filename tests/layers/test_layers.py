"""Layer types against slow references: a row at a time through the plain layer, weights folded entry by entry."""

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from cases import B, Calls, K, LowRank, Post, Same, Standardised, TimeFirst, Windows
from reference import captured, close, converted, folded_entry_by_entry, multiplied, row_by_row
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import ibnn
from ibnn.layers import registry as layers


def _convolutions() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[int, ...]]]:
    options: dict[str, dict[str, object]] = {
        "stride-dilation-groups": {"stride": 2, "padding": 2, "dilation": 2, "groups": 2, "bias": False},
        "depthwise": {"groups": 4, "padding": "same"},
        **{mode: {"padding": 1, "padding_mode": mode} for mode in ("zeros", "reflect", "replicate", "circular")},
    }
    transposed: dict[str, dict[str, object]] = {
        "plain": {},
        "output-padding-groups": {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2},
        "depthwise-dilation": {"groups": 4, "dilation": 2, "bias": False},
    }
    for n in (1, 2, 3):
        for family, table in ((f"Conv{n}d", options), (f"ConvTranspose{n}d", transposed)):
            for label, chosen in table.items():
                make = getattr(nn, family)
                yield f"{family}-{label}", lambda m=make, c=chosen: m(4, 8, 3, **c), (B, 4, *[5, 4, 3][:n])


SINGLES = [
    ("Linear-BD", lambda: nn.Linear(4, 3), (B, 4)),
    ("Linear-BTD", lambda: nn.Linear(4, 3, bias=False), (B, 5, 4)),
    ("Linear-BTUD", lambda: nn.Linear(4, 3), (B, 5, 2, 4)),
    *_convolutions(),
]


@pytest.fixture(params=SINGLES, ids=lambda case: case[0])
def single(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    """A bare layer, itself the root of its network, and a batch for it."""
    _, make, shape = request.param
    return make().double(), torch.randn(shape, dtype=torch.float64)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types registered in a test are forgotten after it."""
    monkeypatch.setattr(layers, "REGISTRY", dict(layers.REGISTRY))


# --- the layers of torch -----------------------------------------------------------------------


def test_training_gives_every_row_its_own_z(single: tuple[nn.Module, Tensor]) -> None:
    net, x = single
    model = converted(net).train()
    with captured(model) as met:
        output = model(x)
    (z,) = met[""]
    assert z.shape == (B, 4)
    assert len(z.unique()) == z.numel()  # no two rows or nodes share a draw
    assert close(output, row_by_row(net, {"": z}, x))


def test_z_of_one_is_the_layer_bit_for_bit(single: tuple[nn.Module, Tensor]) -> None:
    net, x = single
    plain = net(x)
    model = converted(net).train()
    assert torch.equal(model.net(x), plain)  # without z there is nothing to multiply
    model.set_posterior(mean=1.0, std=0.0)
    assert torch.equal(model(x), plain)
    assert all(torch.equal(row, plain) for row in model.draw_logits(x, samples=2))


def test_draws_are_plain_layers_with_z_folded_in(single: tuple[nn.Module, Tensor]) -> None:
    net, x = single
    model = converted(net).eval()
    rows = model.draw_logits(x, samples=2)
    with captured(model) as met:
        assert torch.equal(model.draw_logits(x, samples=2), rows)
    assert rows.shape[0] == K * 2
    assert not close(rows[0], rows[1])
    for row, z, (k, s) in zip(rows, met[""], itertools.product(range(K), range(2)), strict=True):
        assert close(row, multiplied(net, {"": z})(x))
        drawn = model.draw(component=k, index=s)
        assert torch.equal(drawn.weight, folded_entry_by_entry(net, z))
        assert close(drawn(x), row)


def test_components_are_plain_layers_with_the_mean_folded_in(single: tuple[nn.Module, Tensor]) -> None:
    net, _ = single
    model = converted(net).train()
    for k in range(K):
        component = model.component(k)
        assert type(component) is type(net)
        assert not component.training
        assert vars(component).keys() == vars(net).keys()
        assert component.state_dict().keys() == net.state_dict().keys()
        assert not component._forward_pre_hooks
        assert not component._forward_pre_hooks_with_kwargs
        assert torch.equal(component.weight, folded_entry_by_entry(net, model.latents[""].mean[k].detach()))
        assert component.bias is None or torch.equal(component.bias, net.bias)


def test_frozen_weights_stay_frozen_when_folded() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    component = converted(net).component(0)
    assert [p.requires_grad for p in component.parameters()] == [False, False, True, True]


# --- how inputs reach a layer -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["positional", "keyword", "keywords swapped"])
def test_the_input_is_found_however_a_layer_is_called(how: str) -> None:
    net, x = Calls(how).double(), torch.randn(B, 2, 5, dtype=torch.float64)
    model = converted(net).train()
    with captured(model) as met:
        output = model(x)
    net.how = "positional"
    assert close(output, row_by_row(net, {"up": met["up"][0]}, x))
    assert close(model.draw(component=1)(x), model.draw_logits(x, samples=1)[1])


def test_windows_folded_into_the_batch_share_their_rows_z() -> None:
    net, x = Windows().double(), torch.randn(B, 2, 6, dtype=torch.float64)
    model = converted(net).train()
    with captured(model) as met:
        output = model(x)
    assert close(output, row_by_row(net, {name: z[0] for name, z in met.items()}, x))


@pytest.mark.parametrize("shape", [(4, 3, 4), (2, 3, 4)])
def test_a_layer_that_sees_time_first_multiplies_its_batch_dimension(shape: tuple[int, ...]) -> None:
    net, x = TimeFirst().double().eval(), torch.randn(shape, dtype=torch.float64)
    model = converted(net).train()
    model.net.norm.eval()
    model(x)  # looks where the batch is
    with captured(model) as met:
        output = model(x)
    assert close(output, row_by_row(net, {name: z[0] for name, z in met.items()}, x))


def test_a_layer_that_sees_time_first_changes_statistics_once() -> None:
    net, x = TimeFirst().double(), torch.randn(4, 3, 4, dtype=torch.float64)
    model = converted(net).train()
    model(x)
    net(x)
    assert torch.equal(model.net.norm.running_mean, net.norm.running_mean)
    assert model.net.norm.num_batches_tracked == 1


def test_a_row_without_a_batch_dimension_is_refused() -> None:
    model = converted(nn.Conv1d(2, 3, 2)).train()
    with pytest.raises(ValueError, match=r"`input of layer ''` .*shape \(2, 5\)"):
        model(torch.randn(2, 5))


# --- parametrised weights -----------------------------------------------------------------------


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


PARAMETRISED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": old_weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
}


@pytest.fixture(params=PARAMETRISED)
def parametrised(request: pytest.FixtureRequest) -> nn.Module:
    """A net with a parametrised linear layer and a parametrised convolution."""
    wrap = PARAMETRISED[request.param]
    return nn.Sequential(wrap(nn.Conv1d(6, 8, 3)), nn.Tanh(), nn.Flatten(), wrap(nn.Linear(16, 5))).double()


SIGNAL = torch.randn(B, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_plan_and_convert_leave_parametrised_weights_alone(parametrised: nn.Module) -> None:
    before = copy.deepcopy(parametrised.train().state_dict())
    ibnn.plan(parametrised)
    model = converted(parametrised, copy=False)
    assert {name for name in model.net.state_dict() if ".latent." not in name} == before.keys()
    for name, value in before.items():  # spectral_norm steps on when its weight is read in train mode
        assert torch.equal(model.net.state_dict()[name], value), name


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("copy_net", [True, False])
def test_parametrised_weights_at_z_of_one_are_the_net_bit_for_bit(
    parametrised: nn.Module, training: bool, copy_net: bool
) -> None:
    start = copy.deepcopy(parametrised.state_dict())
    plain = parametrised.train(training)(SIGNAL).detach()
    parametrised.load_state_dict(start)
    model = converted(parametrised, copy=copy_net).train(training)
    model.set_posterior(mean=1.0, std=0.0)
    outputs = [model(SIGNAL)] if training else model.draw_logits(SIGNAL, samples=1)
    assert all(torch.equal(output, plain) for output in outputs)


@pytest.mark.parametrize("copy_net", [True, False])
def test_parametrised_weights_fold_and_the_model_lives_on(parametrised: nn.Module, copy_net: bool) -> None:
    plain = parametrised.eval()(SIGNAL)
    model = converted(parametrised, copy=copy_net).eval()
    rows = model.draw_logits(SIGNAL, samples=2)
    for k, s in itertools.product(range(K), range(2)):
        assert close(model.draw(component=k, index=s)(SIGNAL), rows[k * 2 + s])
    component = model.component(1)
    assert [type(layer) for layer in component] == [nn.Conv1d, nn.Tanh, nn.Flatten, nn.Linear]
    assert set(component.state_dict()) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    for name in ("0", "3"):
        expected = folded_entry_by_entry(model.net.get_submodule(name), model.latents[name].mean[1])
        assert torch.equal(component.get_submodule(name).weight, expected)
    assert torch.equal(model.draw_logits(SIGNAL, samples=2), rows)
    assert torch.equal(ibnn.revert(model)(SIGNAL), plain)
    assert torch.equal(parametrised(SIGNAL), plain)


class Mixed(nn.Module):
    """A parametrisation with a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, weight: Tensor) -> Tensor:
        return self.mix(weight)


def test_layers_inside_a_parametrisation_are_left_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 3))
    nn.utils.parametrize.register_parametrization(net[0], "weight", Mixed())
    plan = ibnn.plan(net)
    assert [entry.name for entry in plan.layers] == ["0"]
    assert plan.skipped == ()


# --- registered types ---------------------------------------------------------------------------


class Scale(nn.Module):
    """y = x ∘ gain, nodes last."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.width, self.gain = nodes, nn.Parameter(torch.randn(nodes))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class SubScale(Scale):
    """A subclass, found through its base."""


class Conv1D(nn.Module):
    """As GPT-2's linear layer, weight (D, out)."""

    def __init__(self, out: int, nodes: int) -> None:
        super().__init__()
        self.nx = nodes
        self.weight, self.bias = nn.Parameter(torch.randn(nodes, out)), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def _fold_scale(layer: nn.Module, z: Tensor) -> Tensor:
    return layer.gain * z


def _check_registered(net: nn.Module, name: str, x: Tensor) -> None:
    model = converted(net).train()
    assert list(model.latents) == [name, "1"]
    with captured(model) as met:
        output = model(x)
    assert close(output, row_by_row(net, {n: z[0] for n, z in met.items()}, x))
    assert close(model.draw(component=2, index=1)(x), model.draw_logits(x, samples=2)[5])
    model.set_posterior(mean=1.0, std=0.0)
    assert torch.equal(model(x), net(x))


@pytest.mark.parametrize("layer", [Scale, f"{__name__}.Scale"])
@pytest.mark.parametrize("nodes", ["width", lambda layer: len(layer.gain)])
@pytest.mark.parametrize("cls", [Scale, SubScale])
@pytest.mark.usefixtures("registry")
def test_register_layer_by_class_and_by_dotted_name(layer: type | str, nodes: object, cls: type[Scale]) -> None:
    net = nn.Sequential(cls(4), nn.Linear(4, 3)).double()
    assert [entry.name for entry in ibnn.plan(net).layers] == ["1"]
    ibnn.register_layer(layer, nodes=nodes, fold=_fold_scale, weight="gain")
    assert [(e.name, e.type, e.nodes) for e in ibnn.plan(net).layers] == [("0", cls.__name__, 4), ("1", "Linear", 4)]
    _check_registered(net, "0", torch.randn(B, 4, dtype=torch.float64))


@pytest.mark.usefixtures("registry")
def test_the_nearest_registered_base_wins() -> None:
    ibnn.register_layer(Scale, nodes="width", fold=_fold_scale, weight="gain")
    ibnn.register_layer(SubScale, nodes=lambda layer: 1, fold=_fold_scale, weight="gain")
    assert [layers.layer_type(layer).nodes(layer) for layer in (Scale(4), SubScale(4))] == [4, 1]
    assert layers.layer_type(nn.ReLU()) is None


def test_the_linear_layer_of_gpt2_is_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conv1D, "__module__", "transformers.pytorch_utils")
    _check_registered(nn.Sequential(Conv1D(5, 4), nn.Linear(5, 3)).double(), "0", torch.randn(B, 4).double())


@pytest.mark.parametrize(
    ("layer", "axis", "error", "message"),
    [
        (nn.Linear(1, 1), -1, TypeError, r"`layer` to be an nn.Module class .* but got Linear\(.*\. Pass the class"),
        (int, -1, TypeError, r"`layer` to be an nn.Module class .* but got <class 'int'>\. Pass the class"),
        (Scale, 0, ValueError, r"`axis` to be negative .* but got 0\. Pass axis=-1"),
    ],
)
def test_register_layer_refuses(layer: object, axis: int, error: type[Exception], message: str) -> None:
    before = dict(layers.REGISTRY)
    with pytest.raises(error, match=message):
        ibnn.register_layer(layer, nodes="width", fold=_fold_scale, axis=axis)
    assert before == layers.REGISTRY


def _draw_and_row(layers: list[nn.Module]) -> tuple[Tensor, Tensor]:
    """What a drawn network and its row of draws say of the same batch."""
    net = nn.Sequential(*layers, nn.Tanh(), nn.Linear(5, 2)).double()
    model, x = converted(net).eval(), torch.randn(B, 4, 6, dtype=torch.float64)
    assert len(model.latents) > 1
    return model.draw(component=1, index=1)(x), model.draw_logits(x, samples=2)[3]


def test_subclasses_and_layers_within_layers_fold_exactly() -> None:
    assert [e.name for e in ibnn.plan(nn.Sequential(Same(4, 3, 3), Post(4, 2))).layers] == ["0", "1", "1.post"]
    assert close(*_draw_and_row([Same(4, 3, 3), nn.Flatten(), nn.Linear(18, 5)]))
    assert close(*_draw_and_row([nn.Flatten(), Post(24, 5)]))


@pytest.mark.parametrize("cls", [LowRank, Standardised])
def test_a_subclass_that_cannot_be_folded_is_never_folded_wrongly(cls: type[nn.Module]) -> None:
    layers = [nn.Flatten(), cls(24, 5)] if cls is LowRank else [cls(4, 3, 3), nn.Flatten(), nn.Linear(12, 5)]
    with contextlib.suppress(ValueError, RuntimeError):  # refusing is right too
        assert close(*_draw_and_row(layers))
