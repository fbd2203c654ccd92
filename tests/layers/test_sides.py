"""Latents on outputs and biases, against products written out here."""

import copy
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import B, K, Post, TimeFirst, Windows
from reference import captured, close, converted
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import ibnn
from ibnn.contrib.sides import SidedLatent
from ibnn.network import by_layer, prior_stds
from ibnn.noise import depth_factor, divide_noise

SINGLES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 6), (B, 4)),
    "linear, steps": (lambda: nn.Linear(4, 6), (B, 3, 4)),
    "linear, no bias": (lambda: nn.Linear(4, 6, bias=False), (B, 4)),
    "conv1d, groups": (lambda: nn.Conv1d(4, 6, 2, groups=2, stride=2), (B, 4, 5)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (B, 4, 3, 4)),
    "conv3d, depthwise": (lambda: nn.Conv3d(4, 8, 2, groups=4, dilation=2), (B, 4, 3, 3, 3)),
}
PLACES = [("output", "none"), ("both", "layer"), ("both", "node"), ("input", "layer"), ("both", "none")]


@pytest.fixture(params=SINGLES)
def single(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    make, shape = SINGLES[request.param]
    torch.manual_seed(0)
    return make().double(), torch.randn(shape, dtype=torch.float64)


@pytest.fixture(params=PLACES, ids=lambda pair: "-".join(pair))
def places(request: pytest.FixtureRequest) -> dict[str, str]:
    return dict(zip(("where", "bias_latents"), request.param, strict=True))


def parts(layer: nn.Module, z: Tensor, where: str, bias_latents: str) -> tuple[Tensor, Tensor, Tensor]:
    """Factors of 4 inputs, of the outputs and of the bias, from z (nodes,): ones where there is no latent."""
    outputs = layer.weight.shape[0] if isinstance(layer, nn.Linear) else layer.out_channels
    z_in, r, v = torch.ones(4).double(), torch.ones(outputs).double(), torch.ones(outputs).double()
    at = 0
    if where != "output":
        z_in, at = z[:4], 4
    if where != "input":
        r, at = z[at : at + outputs], at + outputs
    if bias_latents != "none" and layer.bias is not None:
        count = 1 if bias_latents == "layer" else outputs
        v, at = z[at : at + count].expand(outputs), at + count
    assert at == len(z)
    return z_in, r, v


def written_out(layer: nn.Module, x: Tensor, factors: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """r ∘ (U (z ∘ x) + v ∘ b) for rows x: the plain layer without its bias, which is added here."""
    z_in, r, v = factors
    product, bias = copy.deepcopy(layer), 0.0 if layer.bias is None else layer.bias * v
    product.bias = None
    spatial = 0 if isinstance(layer, nn.Linear) else x.dim() - 2
    shaped = lambda t: t.reshape(-1, *[1] * spatial) if isinstance(t, Tensor) else t  # noqa: E731
    return (product(x * shaped(z_in)) + shaped(bias)) * shaped(r)


# -------------------------------------------------------------------------------------------------------- one layer


def test_outputs_alone_have_the_papers_form() -> None:
    model = ibnn.convert(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)), where="output")
    assert model.draws == "channel"


def test_training_gives_every_row_its_own_factors(single: tuple[nn.Module, Tensor], places: dict[str, str]) -> None:
    net, x = single
    if net.bias is None:
        places = {"where": places["where"].replace("input", "both"), "bias_latents": "none"}
    model = converted(net, **places).train()
    with captured(model) as met:
        output = model(x)
    (z,) = met[""]
    assert z.shape == (B, model.nodes)
    assert len(z.unique()) == z.numel()
    rows = [written_out(net, x[i : i + 1], parts(net, z[i], **places)) for i in range(B)]
    assert close(output, torch.cat(rows))


def test_draws_fold_and_are_those_written_out(
    single: tuple[nn.Module, Tensor], places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = single
    if net.bias is None:
        places = {"where": "both", "bias_latents": "none"}
    model = converted(net, **places).eval()
    z, outputs = model.draw_latents(2, 9).z, model.draw_logits(x, 2, 9)
    for j in range(2 * K):
        assert close(outputs[j], written_out(net, x, parts(net, z[j], **places)))
    with torch.no_grad():  # weights are multiplied where that is cheaper; draws as rows of one batch
        latent = next(iter(model.latents.values()))
        monkeypatch.setattr(type(latent), "_folding_pays", lambda *_: True)
        folded = model.outputs(x, z[:1])
        monkeypatch.undo()
        for same in (model.draw_logits(x, 2, 9), model.draw_logits(x, 2, 9, batch_size=256)):
            assert torch.allclose(same, outputs, rtol=1e-9, atol=1e-11)
    assert torch.allclose(folded[0], outputs[0], rtol=1e-9, atol=1e-11)
    plain = model.draw(component=1, index=1, seed=9)
    assert set(plain.state_dict()) == set(net.state_dict())
    assert close(plain(x), outputs[3])
    assert not isinstance(plain._modules.get("latent"), ibnn.Latent)


def test_weights_are_multiplied_entry_by_entry(single: tuple[nn.Module, Tensor]) -> None:
    net, _ = single
    places = {"where": "both", "bias_latents": "none" if net.bias is None else "node"}
    model = converted(net, **places)
    z_in, r, v = parts(net, model.posterior().mean[2].detach(), **places)
    found, groups = model.component(2), getattr(net, "groups", 1)
    for first, second in itertools.product(*map(range, net.weight.shape[:2])):
        o, i = first, first // (net.weight.shape[0] // groups) * net.weight.shape[1] + second  # inputs of a group
        assert close(found.weight[first, second], net.weight[first, second] * z_in[i] * r[o])
    if net.bias is not None:
        assert close(found.bias, net.bias * v * r)


def test_factors_of_one_are_the_layer_bit_for_bit(single: tuple[nn.Module, Tensor], places: dict[str, str]) -> None:
    net, x = single
    if net.bias is None:
        places = {"where": "both", "bias_latents": "none"}
    plain = net(x)
    model = converted(net, **places).train()
    assert torch.equal(model.net(x), plain)
    model.set_posterior(mean=1.0, std=0.0)
    assert torch.equal(model(x), plain)
    assert all(torch.equal(row, plain) for row in model.draw_logits(x, samples=2))
    assert torch.equal(model.component(0)(x), plain)
    assert torch.equal(ibnn.revert(model)(x), plain)


@pytest.mark.parametrize("name", ["linear, steps", "conv3d, depthwise"])
def test_gradients_of_all_factors(name: str) -> None:
    make, shape = SINGLES[name]
    model, x = converted(make().double(), where="both", bias_latents="node").train(), torch.randn(shape).double()
    z = torch.randn(1, B, model.nodes, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda z: model.outputs(x, z), (z,))
    output = model.outputs(x, z.detach()).sum()
    weight, bias = torch.autograd.grad(output, (model.net.weight, model.net.bias))
    rows = [written_out(model.net, x[i : i + 1], parts(model.net, z[0, i].detach(), "both", "node")) for i in range(B)]
    expected = torch.autograd.grad(torch.cat(rows).sum(), (model.net.bias,))
    assert close(bias, expected[0])
    assert bool(weight.any())


# ------------------------------------------------------------------------------------------------------ the network


def make_net() -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 9, 3, padding=1), nn.Conv2d(9, 4, 3, stride=2, bias=False)
    return nn.Sequential(first, nn.ReLU(), second, nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


X = torch.randn(B, 1, 6, 6, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 1])
ALL = {"where": "both", "bias_latents": "layer"}


def made(**options: object) -> ibnn.IBNN:
    return ibnn.convert(make_net(), **{"components": K, "seed": 5, **ALL, **options})


def test_nodes_keys_and_kl_count_all_latents() -> None:
    net, model = make_net(), made(kl="mean", prior_std=0.2)
    assert model.nodes == (1 + 9 + 1) + (9 + 4) + (16 + 3 + 1)
    assert {name for name in model.net.state_dict() if ".latent." not in name} == set(net.state_dict())
    total = 0.0
    model.double()
    for latent in model.latents.values():
        for means, stds in zip(latent.mean.T.tolist(), latent.std.T.tolist(), strict=True):
            ratio = sum(std**2 for std in stds) / K**2 / 0.2**2
            total += 0.5 * (ratio + ((sum(means) / K - 1) / 0.2) ** 2 - 1 - math.log(ratio))
    assert model.kl().item() == pytest.approx(total, rel=1e-9)


def test_a_step_moves_every_latent() -> None:
    model = made().train()
    model.elbo(X, Y, n_data=100).loss.backward()
    for name, latent in model.latents.items():
        assert bool((latent.mean.grad.abs().sum(0) > 0).all()), name
        assert bool((latent.rho.grad.abs().sum(0) > 0).all()), name


def test_gradient_checkpointing_repeats_the_draw() -> None:
    class Repeated(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    plain, repeated = (ibnn.convert(net, components=K, seed=5, **ALL) for net in (make_net(), Repeated(make_net())))
    gradients = []
    for model in (plain, repeated):
        model.train().elbo(X, Y, n_data=100).loss.backward()
        gradients.append([p.grad for latent in model.latents.values() for p in latent.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


@pytest.mark.slow
def test_a_compiled_network_computes_the_same() -> None:
    model = made().eval()
    expected = model(X)
    assert torch.allclose(torch.compile(model, backend="eager")(X), expected, atol=1e-6)


@pytest.mark.parametrize("make", [TimeFirst, Windows])
def test_the_batch_may_be_elsewhere(make: Callable[[], nn.Module]) -> None:
    net = make().double().eval()
    x = torch.randn(*((B, 3, 4) if make is TimeFirst else (B, 2, 7)), dtype=torch.float64)
    model = converted(net, **ALL)
    z = torch.randn(B, model.nodes, dtype=torch.float64)
    together = model.outputs(x, z[None])[0]
    for i in range(B):
        assert close(together[i], model.outputs(x[i : i + 1], z[i : i + 1])[0, 0])


def test_other_hooks_see_the_output() -> None:
    net, seen = make_net(), []
    net[0].register_forward_hook(lambda layer, args, output: seen.append(output))
    model = ibnn.convert(net, components=K, seed=5, copy=False, **ALL)
    model.set_posterior(mean=2.0, std=0.0)
    model.draw_logits(X, 1)
    net[0].weight.data.mul_(4)  # 2 for its input, 2 for its output; the bias 2 for itself, 2 for the output
    net[0].bias.data.mul_(4)
    assert torch.allclose(seen[0], ibnn.revert(model)[0](X), atol=1e-5)


def test_a_computed_bias_is_multiplied_and_folds() -> None:
    class Doubled(nn.Module):
        def forward(self, bias: Tensor) -> Tensor:
            return 2 * bias

    layer = parametrizations.weight_norm(nn.Linear(4, 6).double())
    nn.utils.parametrize.register_parametrization(layer, "bias", Doubled())
    x = torch.randn(B, 4).double()
    model = converted(nn.Sequential(layer), **ALL).eval()
    outputs = model.draw_logits(x, 2)
    with torch.no_grad():
        assert close(model.outputs(x.expand(20, *x.shape).flatten(0, 1), model.draw_latents(2).z)[:, :B], outputs)
    assert close(model.draw(1, 0)(x), outputs[2])
    assert type(model.component(0)[0]) is nn.Linear


# ------------------------------------------------------------------------------------------------------ which layers


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(7, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.memory, self.own, self.head = nn.GRU(4, 4, batch_first=True), Post(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        x = x + self.attention(x, x, x)[0]
        return self.head(self.own(self.memory(x)[0].mean(1)))


def test_types_without_an_output_side_keep_their_inputs() -> None:
    everything = ["words", "attention", "memory", "own", "head"]
    planned = ibnn.plan(Mixed(), include=everything, **ALL)
    assert {layer.name: (layer.nodes, layer.where) for layer in planned.layers} == {
        "words": (4, "output"),
        "attention": (16, "input"),
        "memory": (8, "input"),
        "own": (4, "input"),
        "own.post": (7 + 5 + 1, "input + output + bias"),
        "head": (5 + 3 + 1, "input + output + bias"),
    }
    assert [line.split()[2:] for line in str(planned).splitlines() if line.startswith("head ")] == [
        ["9", "18", "input", "+", "output", "+", "bias"]
    ]
    output = ibnn.plan(Mixed(), include=everything, where="output")
    assert {layer.name: layer.where for layer in output.layers} == dict.fromkeys(
        ["words", "own.post", "head"], "output"
    )
    assert {e.name for e in output.skipped if "no output side" in e.reason} == {"attention", "memory", "own"}
    model = ibnn.convert(Mixed(), include=everything, components=K, seed=0, **ALL)
    x = torch.randint(7, (B, 5))
    assert bool(model.train()(x).isfinite().all())
    assert isinstance(model.latents["head"], SidedLatent)
    assert type(model.latents["attention"]) is ibnn.Latent


@pytest.mark.parametrize(
    ("net", "options", "message"),
    [
        (make_net(), {"where": "inputs"}, r"`where` to be one of input, output, both, but got 'inputs'. Did you mean"),
        (make_net(), {"bias_latents": True}, r"`bias_latents` to be one of none, layer, node, but got True"),
        (nn.GRU(3, 2), {"where": "both"}, r"`where` to be of a network with a layer whose output.*\(net\) \(GRU\)"),
        (nn.GRU(3, 2), {"where": "output"}, r"`net` to be a network with layers to convert.*has no output side"),
        (nn.Linear(3, 2, bias=False), {"bias_latents": "node"}, r"`bias_latents` .*whose bias can have latents"),
    ],
)
def test_what_cannot_be_is_refused(net: nn.Module, options: dict[str, object], message: str) -> None:
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        ibnn.convert(net, copy=False, **options)
    assert net.state_dict().keys() == before.keys()


# --------------------------------------------------------------------------------------------------- with the rest


def test_noise_of_units_is_divided_among_inputs_alone() -> None:
    model = made(draws="both", prior_std=1.0)
    divide_noise(model)
    stds = prior_stds(model)
    assert stds.shape == (model.nodes,)
    parts = [part for _, _, part in by_layer(model, stds)]
    depth = depth_factor(model.latents.values(), model.draws)
    assert depth == pytest.approx((4 / 2) ** 0.5)  # one channel has hardly any noise
    assert parts[0].tolist() == pytest.approx([0.03 * depth, *[1.0] * 10])  # outputs and bias have the prior's
    assert parts[1].tolist() == pytest.approx([*[0.5 * depth] * 9, *[1.0] * 4])
    outputs = model.eval().draw_logits(X, 1, 3)
    assert torch.allclose(model.draw(2, 0, 3)(X), outputs[2], atol=1e-5)


def test_saves_hold_where_latents_are(tmp_path: Path) -> None:
    model = made().eval()
    model.save_pretrained(tmp_path / "all")
    model.save_pretrained(tmp_path / "latents", latents_only=True)
    config = json.loads((tmp_path / "all/config.json").read_text())
    assert (config["where"], config["bias_latents"]) == ("both", "layer")
    again = ibnn.load(tmp_path / "all", make_net().eval())
    one = ibnn.load(tmp_path / "latents", net := make_net().eval(), copy=False)
    for other in (again, one):
        assert (other.where, other.bias_latents) == ("both", "layer")
        assert torch.equal(other(X), model(X))
    assert one.net[0].weight is net[0].weight
    narrow = make_net().eval()
    narrow[0] = nn.Conv2d(1, 9, 3, padding=1, bias=False)
    with pytest.raises(ValueError, match=r"`net` to be a network with a layer '0' of 11 nodes, but got one of 10"):
        ibnn.load(tmp_path / "all", narrow)


@pytest.mark.parametrize("format", ["torch", pytest.param("onnx", marks=pytest.mark.slow)])
def test_exported_files_answer_alike(tmp_path: Path, format: str) -> None:
    if format == "onnx":
        pytest.importorskip("onnxruntime")
    model = made().eval()
    written = ibnn.export(model, X, tmp_path / "model", samples=2, format=format)
    assert written.difference < 1e-5
    units = (written.draw_bytes - 4 * 2 * K * model.nodes) / (4 * 2 * K)
    assert units == 9 * 6 * 6  # inputs of the second convolution


def test_doctor_calibration_and_novelty_understand_them() -> None:
    model = made()
    report = ibnn.diagnose(model, inputs=X)
    assert [row.nodes for row in report.layers] == [11, 13, 20]
    x = torch.randn(150, 1, 6, 6, generator=torch.Generator().manual_seed(2))
    y = model.net.eval()(x).argmax(1).detach()
    found = ibnn.calibrate(model, (x, y), samples=2, progress=False)
    assert found.after["nll"] <= found.temperature_scaling["nll"] + 1e-6
    assert model.predict(x[:9], samples=2, progress=False).p_value is not None
    assert model.predict(100 * x[:9], samples=2, progress=False).novel(0.05).all()
