"""Checkpoints of the authors' code: their layer's equations, written out here, and files in its layout."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ibnn
from ibnn.contrib.authors import load_authors
from ibnn.normal import Space, address, normals

B, K, PRIOR = 4, 3, 0.3
State = dict[str, Tensor]
Map = Callable[[Tensor], Tensor]


def make_net() -> nn.Module:
    torch.manual_seed(3)
    conv, free = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 3, 1, bias=False)
    return nn.Sequential(conv, nn.ReLU(), free, nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 5)).double().eval()


X = torch.randn(B, 2, 3, 3, generator=torch.Generator().manual_seed(1)).double()
LAYERS = {"0": (2, 3), "2": (3, 3), "5": (12, 5)}  # inputs and outputs


def make_state(where: str = "input", bias: bool = True) -> State:
    """A state dict in the authors' layout, other numbers in every entry."""
    net, generator = make_net(), torch.Generator().manual_seed(2)
    state = {name: value + 1 if value.dim() == 0 else value * 2 for name, value in net.state_dict().items()}
    draw = lambda *shape: torch.randn(shape, generator=generator).double()  # noqa: E731
    for name, (inputs, outputs) in LAYERS.items():
        nodes = {"input": inputs, "output": outputs, "both": inputs + outputs}[where]
        inner = [1] * (net[int(name)].weight.dim() - 2)
        state |= {f"{name}.posterior_U_mean": 1 + 0.5 * draw(K, nodes, *inner)}
        state |= {f"{name}.posterior_U_std": draw(K, nodes, *inner) - 2}
        if bias and net[int(name)].bias is not None:
            state |= {f"{name}.posterior_B_mean": 1 + 0.5 * draw(K, 1, *inner)}
            state |= {f"{name}.posterior_B_std": draw(K, 1, *inner) - 2}
        state |= {f"{name}.prior_mean": torch.tensor(1.0), f"{name}.prior_std": torch.tensor(PRIOR)}
    return state


def their_layer(
    state: State, name: str, k: int, noise: Tensor, product: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """Their forward for one row: U (z ∘ x) + v b with z = μ + σ ε for nodes, v = m + s ε for the layer."""
    of = {key.rpartition(".")[2]: value for key, value in state.items() if key.startswith(f"{name}.")}
    mean, std = of["posterior_U_mean"][k].flatten(), of["posterior_U_std"][k].flatten()
    factors = [float(mean[d]) + math.log1p(math.exp(std[d])) * float(noise[d]) for d in range(len(mean))]
    output = product(torch.stack([x[d] * factors[d] for d in range(len(factors))]))
    if "bias" in of:
        v = float(of["posterior_B_mean"][k]) + math.log1p(math.exp(of["posterior_B_std"][k])) * float(noise[len(mean)])
        output = torch.stack([output[o] + v * float(of["bias"][o]) for o in range(len(output))])
    return output


def their_kl(state: State) -> float:
    """Σ over nodes and biases of KL(N(mean of μ, Σ σ² / K²) ‖ N(1, s²))."""
    total = 0.0
    for name, means in state.items():
        if name.endswith("_mean") and "posterior" in name:
            stds = state[name.removesuffix("mean") + "std"].flatten(1).T.tolist()
            for mu, rho in zip(means.flatten(1).T.tolist(), stds, strict=True):
                mean = sum(mu) / K
                variance = sum(math.log1p(math.exp(r)) ** 2 for r in rho) / K**2
                total += math.log(PRIOR / math.sqrt(variance)) + (variance + (mean - 1) ** 2) / (2 * PRIOR**2) - 0.5
    return total


def test_outputs_and_kl_are_those_of_the_authors_layer() -> None:
    state = make_state()
    model = load_authors(state, make_net())
    assert (model.components, model.nodes, model.kl_kind) == (K, 2 + 1 + 3 + 12 + 1, "mean")
    assert model.kl().item() == pytest.approx(their_kl(state), rel=1e-7)  # the prior is a float32
    outputs = model.draw_logits(X, 2, 7)
    for k, s, row in ((0, 0, 0), (1, 1, 2), (2, 0, 3)):
        noise = normals(address(7, Space.PREDICT, k - k % 2, s), model.nodes)[0].double() * (-1) ** k
        noise = noise.split([3, 3, 13])
        conv = lambda x: F.conv2d(x[None], state["0.weight"])[0]  # noqa: E731
        free = lambda x: F.conv2d(x[None], state["2.weight"])[0]  # noqa: E731
        x = their_layer(state, "0", k, noise[0], conv, X[row]).relu()
        x = their_layer(state, "2", k, noise[1], free, x)[None]
        named = {name: state[f"3.{name}"] for name in ("running_mean", "running_var", "weight", "bias")}
        x = F.batch_norm(x, **named)[0].flatten()
        x = their_layer(state, "5", k, noise[2], lambda x: state["5.weight"] @ x, x)
        assert torch.allclose(outputs[k * 2 + s, row], x, rtol=1e-9, atol=1e-9)


def test_a_component_is_the_plain_network_they_make_of_it() -> None:
    state = make_state()
    plain = load_authors(state, make_net()).component(1)
    for name in LAYERS:
        mean = state[f"{name}.posterior_U_mean"][1]
        assert torch.allclose(plain[int(name)].weight, state[f"{name}.weight"] * mean)
    assert torch.allclose(plain[5].bias, state["5.bias"] * state["5.posterior_B_mean"][1])
    assert torch.equal(plain[3].running_mean, state["3.running_mean"])
    assert plain[3].num_batches_tracked == 1


@pytest.mark.parametrize("where", ["output", "both"])
def test_their_later_code_multiplies_outputs_with_their_bias(where: str) -> None:
    state = make_state(where, bias=False)
    model = load_authors(state, make_net(), where=where)
    assert (model.where, model.bias_latents) == (where, "none")
    plain = model.component(2)
    for name, (inputs, outputs) in LAYERS.items():
        mean, layer = state[f"{name}.posterior_U_mean"][2], plain[int(name)]
        expected = state[f"{name}.weight"] * mean[-outputs:][:, None]
        expected = expected * mean[:inputs] if where == "both" else expected
        assert torch.allclose(layer.weight, expected)
        if layer.bias is not None:
            assert torch.allclose(layer.bias, state[f"{name}.bias"] * mean[-outputs:].flatten())


@pytest.mark.parametrize("prefix", ["", "module."])
def test_prefixes_are_left_out_and_the_network_stays(prefix: str) -> None:
    state = {prefix + name: value for name, value in make_state().items()}
    net = make_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    model = load_authors(state, net)
    expected = load_authors(make_state(), make_net())
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())


def without(*names: str) -> State:
    return {name: value for name, value in make_state().items() if not name.endswith(names)}


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "ours": (make_net().state_dict(), {}, "`checkpoint` to be one of the authors' code, with posterior_U_mean"),
    "nested": ({"model": make_state()}, {}, r"a state dict: tensors by name, but got \['model'\].*\['model'\]"),
    "half": (without("U_std"), {}, r"means of shape \(\d, 3\) and deviations of shape \(\d, 1\)"),
    "half a bias": (without("5.posterior_B_std"), {}, r"means of shape \(\d, 13\) and deviations of shape \(\d, 12\)"),
    "one bias": (without("0.posterior_B_std", "0.posterior_B_mean"), {}, "3 latents on layer '0'"),
    "outputs": (make_state("both", bias=False), {}, r"2 latents on layer '0' \(where='input'\).*where='both'"),
    "word": (make_state(), {"where": "in"}, "`where` to be one of input, output, both, but got 'in'"),
    "prior": (make_state() | {"0.prior_std": torch.tensor(1.0)}, {}, "`checkpoint`.*prior_std"),
    "zero": (
        {k: v * 0 if "prior_mean" in k else v for k, v in make_state().items()},
        {},
        "`checkpoint`.*prior_mean of 1",
    ),
    "shape": (make_state() | {"0.weight": torch.ones(3, 2, 3, 3)}, {}, r"where '0.weight' is \(3, 2, 3, 3\)"),
    "name": (make_state() | {"6.weight": torch.ones(1)}, {}, r"where '6.weight' is \(1,\), but got absent"),
    "missing": (without("5.weight"), {}, r"where '5.weight' is absent, but got \(5, 12\)"),
    "layer": ({f"7.{k}": v for k, v in make_state().items()}, {}, r"a layer '7.0' .*, but got none of that name"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case: str) -> None:
    state, options, message = BAD[case]
    net = make_net()
    with pytest.raises(ValueError, match=message):
        load_authors(state, net, **options)
    assert not any(isinstance(module, ibnn.Latent) for module in net.modules())
