import copy
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ibnn
import ibnn.nets
from ibnn.baselines import SWAG, Ensemble, MCDropout, MeanField, Plain
from ibnn.errors import DamagedError
from ibnn.files import sealed
from ibnn.files.saving import fingerprint, load, save_pretrained
from ibnn.nets.dense import Affine

pytest.importorskip("safetensors")


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)).mean(1))


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def mlp(width: int = 7) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def rows(*shape: int) -> Tensor:
    return torch.randn(6, *shape, generator=torch.Generator().manual_seed(1))


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, Tensor, dict[str, Any]]] = {
    "mlp": (mlp, rows(5), torch.arange(6) % 3, {}),
    "batchnorm": (conv, rows(2, 4, 4), torch.arange(6) % 3, {"exclude": "0"}),
    "tied": (Tied, torch.arange(24).view(6, 4) % 11, torch.arange(6), {}),
    "twice": (Twice, rows(5), torch.arange(6) % 5, {"kl": "pairwise", "prior_std": 0.1}),
    "one layer": (lambda: nn.Linear(5, 3), rows(5), torch.arange(6) % 3, {"components": 1}),
    "weighted": (
        mlp,
        rows(5),
        torch.arange(6) % 3,
        {"likelihood": ibnn.Categorical(weight=torch.tensor([1.0, 2.0, 0.5]), ignore_index=1, label_smoothing=0.1)},
    ),
    "bernoulli": (mlp, rows(5), torch.ones(6, 3), {"likelihood": "bernoulli"}),
    "gaussian": (mlp, rows(5), rows(3), {"likelihood": ibnn.Gaussian(init_std=2.0, outputs=3)}),
    "predicted": (lambda: nn.Linear(5, 2), rows(5), rows(1), {"likelihood": ibnn.Gaussian(noise="predicted")}),
    "bfloat16": (lambda: mlp().bfloat16(), rows(5).bfloat16(), torch.arange(6) % 3, {}),
}
NAMES = [pytest.param(name, marks=pytest.mark.bf16 if name == "bfloat16" else ()) for name in CASES]


def trained(name: str) -> tuple[ibnn.IBNN, Tensor]:
    """A model after two steps of training, so that nothing in it is as it was built."""
    make, x, y, options = CASES[name]
    torch.manual_seed(0)
    model = ibnn.convert(make().train(), **copy.deepcopy({"components": 3, "seed": 4, **options}))
    optimiser = torch.optim.SGD(model.parameter_groups(lr=0.1, latent_lr=0.5))
    for _ in range(2):
        optimiser.zero_grad()
        model.elbo(x, y, n_data=20).loss.backward()
        optimiser.step()
    model.eval_samples, model.eval_seed = 2, 9
    return model.eval(), x


def fresh(name: str) -> nn.Module:
    torch.manual_seed(1)  # other weights
    return CASES[name][0]()


def plain(model: ibnn.IBNN) -> nn.Module:
    """The backbone of a model, without its latents."""
    return ibnn.revert(copy.deepcopy(model))


def assert_same(a: ibnn.IBNN, b: ibnn.IBNN, x: Tensor) -> None:
    a.eval(), b.eval()
    assert torch.equal(a(x), b(x))
    ours, theirs = vars(a.predict(x, samples=2)), vars(b.predict(x, samples=2))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if isinstance(ours[name], Tensor))
    state = a.state_dict()
    assert list(state) == list(b.state_dict())
    for name, tensor in b.state_dict().items():
        assert tensor.dtype == state[name].dtype
        assert torch.equal(tensor, state[name]), name
    assert (a.prior_std, a.kl_kind, a.extra_repr()) == (b.prior_std, b.kl_kind, b.extra_repr())
    assert vars(a.likelihood).get("ignore_index") == vars(b.likelihood).get("ignore_index")
    assert vars(a.likelihood).get("label_smoothing") == vars(b.likelihood).get("label_smoothing")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[ibnn.IBNN, Tensor, Path]:
    model, x = trained("mlp")
    save_pretrained(model, tmp_path / "save")
    return model, x, tmp_path / "save"


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    sealed.write_json(path, sealed.read_json(path) | changes)


# ------------------------------------------------------------------------------------------------------ round trips


@pytest.mark.parametrize("name", NAMES)
def test_a_save_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    model, x = trained(name)
    save_pretrained(model, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    assert_same(model, load(tmp_path, fresh(name)), x)


@pytest.mark.parametrize("name", NAMES)
def test_latents_alone_come_back_on_their_backbone(name: str, tmp_path: Path) -> None:
    model, x = trained(name)
    save_pretrained(model, tmp_path, latents_only=True)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "latents.safetensors"]
    assert_same(model, load(tmp_path, plain(model)), x)


@pytest.mark.parametrize("latents_only", [False, True])
def test_training_goes_on_where_it_stopped(latents_only: bool, tmp_path: Path) -> None:
    model, x = trained("batchnorm")
    save_pretrained(model, tmp_path, latents_only=latents_only)
    again = load(tmp_path, plain(model))
    assert int(again.examples) == int(model.examples) == 12
    assert torch.equal(model.train()(x), again.train()(x))


def test_ties_are_tied_again(tmp_path: Path) -> None:
    save_pretrained(trained("tied")[0], tmp_path)
    net: Any = load(tmp_path, fresh("tied")).net
    assert net.head.weight is net.embedding.weight
    assert json.loads((tmp_path / "config.json").read_text())["tied"] == {"net.head.weight": "net.embedding.weight"}


def test_a_tied_save_fills_an_untied_network_but_not_the_reverse(tmp_path: Path) -> None:
    model, x = trained("tied")
    save_pretrained(model, tmp_path)
    assert torch.equal(load(tmp_path, Tied(tie=False)).eval()(x), model(x))
    save_pretrained(ibnn.convert(Tied(tie=False), seed=0), tmp_path)
    with pytest.raises(ValueError, match=r"'net\.embedding\.weight' and 'net\.head\.weight' are apart, as saved"):
        load(tmp_path, Tied())


def test_parameters_that_overlap_in_memory_can_be_saved(tmp_path: Path) -> None:
    net = mlp()
    net[2].bias.data = net[2].weight.data[0, :3]
    model = ibnn.convert(net, copy=False, seed=0).eval()
    save_pretrained(model, tmp_path)
    assert torch.equal(load(tmp_path, mlp()).eval()(rows(5)), model(rows(5)))


def test_only_the_saved_layers_get_latents_even_inside_one_another(tmp_path: Path) -> None:
    class Outer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(5, 5)
            self.inner = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.inner(x)

    net = nn.ModuleDict({"a[0]": Outer(), "b": Outer()})
    net.forward = lambda x: net["b"](net["a[0]"](x))  # type: ignore[method-assign]
    model = ibnn.convert(nn.Sequential(Outer(), Outer()), exclude=["0.inner", "1.inner"], seed=0)
    assert list(model.latents) == ["0", "1"]
    save_pretrained(model, tmp_path)
    assert list(load(tmp_path, nn.Sequential(Outer(), Outer())).latents) == ["0", "1"]
    save_pretrained(ibnn.convert(net, include="b", seed=0), tmp_path)
    assert list(load(tmp_path, net).latents) == ["b.inner", "b"]


def test_the_given_network_is_left_alone(saved: tuple[ibnn.IBNN, Tensor, Path]) -> None:
    net = fresh("mlp")
    before = fingerprint(net)
    load(saved[2], net)
    assert fingerprint(net) == before
    assert list(net.state_dict()) == list(fresh("mlp").state_dict())


def test_without_a_copy_weights_are_shared_and_overwritten(saved: tuple[ibnn.IBNN, Tensor, Path]) -> None:
    model, x, folder = saved
    net = fresh("mlp").double()  # the saved dtype holds
    weight = net[0].weight
    again = load(folder, net, copy=False)
    assert again.net[0].weight is net[0].weight is weight
    assert torch.equal(net(x), plain(model)(x))
    assert not isinstance(getattr(net[0], "latent", None), nn.Module)
    assert_same(model, again, x)


def test_mode_and_frozen_weights_are_the_networks(saved: tuple[ibnn.IBNN, Tensor, Path]) -> None:
    again = load(saved[2], fresh("mlp").eval().requires_grad_(False))
    assert not again.training
    assert {p.requires_grad for n, p in again.net.named_parameters() if "latent" not in n} == {False}
    assert {p.requires_grad for latent in again.latents.values() for p in latent.parameters()} == {True}


def test_global_randomness_is_untouched(tmp_path: Path) -> None:
    model, net = trained("mlp")[0], fresh("mlp")
    random.seed(0)
    before, python = torch.get_rng_state(), random.getstate()
    save_pretrained(model, tmp_path)
    load(tmp_path, net)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python


def test_a_latents_file_is_latents(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(500, 400), nn.ReLU(), nn.Linear(400, 10))
    save_pretrained(ibnn.convert(net, components=8, seed=0), tmp_path, latents_only=True)
    numbers = 4 * 2 * 8 * 900
    assert numbers < (tmp_path / "latents.safetensors").stat().st_size < numbers + 1000


def test_saving_again_gives_the_same_bytes(saved: tuple[ibnn.IBNN, Tensor, Path], tmp_path: Path) -> None:
    folder = saved[2]
    save_pretrained(load(folder, fresh("mlp")), tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_the_config_says_what_was_saved(saved: tuple[ibnn.IBNN, Tensor, Path]) -> None:
    model, _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    assert config["layers"] == {"0": 5, "2": 7}
    assert config["ibnn_version"] == ibnn.__version__
    assert (config["components"], config["prior_std"], config["eval_samples"], config["eval_seed"]) == (3, 0.3, 2, 9)
    options = {"ignore_index": -100, "label_smoothing": 0.0, "axis": None, "next_token": None}
    assert config["likelihood"] == {"name": "Categorical", "options": options}
    assert config["fingerprint"] == fingerprint(model.net) == fingerprint(plain(model))


# ----------------------------------------------------------------------------------------- architectures and baselines


def test_a_save_with_its_architecture_needs_no_network(tmp_path: Path) -> None:
    options = {"classes": 3, "inputs": 5, "hidden": 7, "layers": 1}
    net = ibnn.nets.make("mlp", **options)
    affine = Affine(torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]), -1.0)
    parts = [{"name": "affine", "options": {"scale": affine.scale.tolist(), "shift": -1.0}}]
    parts.append({"name": "mlp", "options": options})
    for whole, architecture in ((net, parts[1]), (nn.Sequential(affine, net), parts)):
        model = ibnn.convert(whole, components=2, seed=0).eval()
        model.save_pretrained(tmp_path, architecture=architecture)
        state = torch.get_rng_state()
        assert_same(model, load(tmp_path), rows(5))
        assert torch.equal(torch.get_rng_state(), state)
        assert not load(tmp_path).training


@pytest.mark.parametrize(
    ("latents_only", "architecture", "words"),
    [
        (False, None, "the save names no architecture, but got None. Build the network yourself"),
        (True, {"name": "lenet"}, "the save holds latents only, but got None"),
        (False, {"name": "os:abort"}, r"its code is your own \(os:abort\), which load does not import, but got None"),
        (False, {"name": "mpl"}, "Did you mean 'mlp'"),
        (False, {"name": "mlp"}, "numbers, and the file holds"),
        (False, {"name": "mlp", "options": {"inputs": 1, "hidden": 7, "layers": 1}}, "a layer '0' of 5 nodes"),
    ],
)
def test_without_a_network_it_is_said_why_one_is_needed(
    latents_only: bool, architecture: Any, words: str, tmp_path: Path
) -> None:
    save_pretrained(ibnn.convert(mlp(), seed=0), tmp_path, latents_only=latents_only, architecture=architecture)
    with pytest.raises(ValueError, match=words):
        load(tmp_path)


@pytest.mark.parametrize("wrong", [[], "lenet", {"net": "lenet"}, [{"options": {}}], {"name": torch.relu}, 3])
def test_an_architecture_of_another_form_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`architecture`"):
        save_pretrained(ibnn.convert(mlp(), seed=0), tmp_path / "new", architecture=wrong)
    assert not (tmp_path / "new").exists()


BASELINES: dict[str, Callable[[], Plain]] = {
    "plain": lambda: Plain(mlp(), ibnn.Gaussian(init_std=0.3, outputs=3)),
    "dropout": lambda: MCDropout(mlp(), rate=0.25),
    "vi": lambda: MeanField(mlp(), prior_std=0.2),
    "swag": lambda: SWAG(mlp(), rank=3),
    "ensemble": lambda: Ensemble([mlp() for _ in range(3)]),
}


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BASELINES[name]().eval()
    if isinstance(model, SWAG):
        for _ in range(4):
            model.net[0].weight.data += torch.randn(7, 5)
            model.collect()
    model.likelihood.temperature.fill_(1.5)
    model.save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    again: Any = load(tmp_path, mlp().eval())
    assert type(again) is type(model)
    assert again.options == model.options
    ours, theirs = model.draw_logits(rows(5), 4, 1), again.draw_logits(rows(5), 4, 1)
    assert torch.equal(ours, theirs)
    assert vars(model.predict(rows(5))).keys() == vars(again.predict(rows(5))).keys()
    state = model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())
    with pytest.raises(ValueError, match="`latents_only`"):
        save_pretrained(model, tmp_path, latents_only=True)


def test_a_method_that_is_not_imported_is_named(tmp_path: Path) -> None:
    Plain(mlp()).save_pretrained(tmp_path)
    edit(tmp_path, method="Laplace")
    with pytest.raises(ValueError, match=r"`directory`.*Laplace"):
        load(tmp_path, mlp())


# ------------------------------------------------------------------------------------------------------ fingerprints


def test_the_fingerprint_sees_weights_names_dtypes_shapes_and_running_statistics() -> None:
    torch.manual_seed(0)
    net = conv()
    seen = {fingerprint(net)}
    assert seen == {fingerprint(copy.deepcopy(net)), fingerprint(ibnn.convert(net, seed=3).net)}

    def changed(change: Callable[[Any], object]) -> str:
        other = copy.deepcopy(net)
        change(other)
        return fingerprint(other)

    seen |= {
        changed(lambda n: n[0].weight.data[0, 0, 0, 0].add_(1e-6)),
        changed(lambda n: n[1].running_mean[0].add_(1e-6)),
        changed(lambda n: n.double()),
        changed(lambda n: n.add_module("more", nn.Linear(1, 1))),
        changed(lambda n: setattr(n[4].weight, "data", n[4].weight.data.view(4, 12))),
        fingerprint(nn.ModuleDict({"a": net})),
    }
    assert len(seen) == 7


def test_the_fingerprint_is_of_values_not_of_their_layout() -> None:
    net = conv()
    assert fingerprint(copy.deepcopy(net).to(memory_format=torch.channels_last)) == fingerprint(net)  # type: ignore[call-overload]


# ---------------------------------------------------------------------------------------------------------- adapters


def test_saves_of_latents_share_one_backbone(tmp_path: Path) -> None:
    net, x = conv().eval(), rows(2, 4, 4)
    options: dict[str, dict[str, Any]] = {
        "a": {"components": 4, "prior_std": 0.1, "seed": 1},
        "b": {"components": 2, "likelihood": "bernoulli", "kl": "components", "seed": 2, "exclude": "0"},
    }
    models = {name: ibnn.convert(net, **kwargs) for name, kwargs in options.items()}
    adapters, before, keys = dict[str, ibnn.IBNN](), fingerprint(net), list(net.state_dict())
    for name, model in models.items():
        save_pretrained(model, tmp_path / name, latents_only=True)
        adapters[name] = load(tmp_path / name, net, copy=False)
    for name in ("a", "b", "a", "b"):
        assert_same(adapters[name], models[name], x)
        assert_same(adapters[name], load(tmp_path / name, net), x)
    for name, tensor in net.state_dict(keep_vars=True).items():
        assert all(adapters[a].net.state_dict(keep_vars=True)[name] is tensor for a in adapters)
    assert (fingerprint(net), list(net.state_dict())) == (before, keys)
    assert torch.equal(net(x), ibnn.revert(models["a"])(x))


def test_every_save_of_latents_has_a_reference_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, adapters = mlp().eval(), dict[str, ibnn.IBNN]()
    x = torch.randn(240, next(net.parameters()).shape[1])
    models = {"a": ibnn.convert(net, components=2, seed=1), "b": ibnn.convert(net, components=3, seed=2)}
    for (name, model), scale in zip(models.items(), (1.0, 5.0), strict=True):
        ibnn.fit_novelty(model, (scale * x, torch.randint(3, (240,))))
        save_pretrained(model, tmp_path / name, latents_only=True)
    for name in ("b", "a"):
        adapters[name] = load(tmp_path / name, net, copy=False)
    for name in ("a", "b"):
        assert_same(adapters[name], models[name], torch.cat([x[:9], 5 * x[:9]]))  # p-values, too
    assert adapters["a"].predict(5 * x).novel(0.05).double().mean() > 0.5
    assert adapters["b"].predict(5 * x).novel(0.05).double().mean() < 0.2


# ------------------------------------------------------------------------------------------------------- refusals


def test_other_weights_are_refused(tmp_path: Path) -> None:
    model = trained("batchnorm")[0]
    save_pretrained(model, tmp_path, latents_only=True)
    net: Any = plain(model)
    net[1].running_var[0] += 1e-3
    with pytest.raises(ValueError, match=r"`net`.*other weights"):
        load(tmp_path, net)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(
    ("net", "words"),
    [
        (lambda: mlp(8), "a layer '2' of 7 nodes, but got one of 8"),
        (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU()), "a layer '2' of 7 nodes, but got none of that name"),
        (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4)), r"'net\.2\.weight' is \(3, 7\).*\(4, 7\)"),
        (lambda: nn.Sequential(*mlp(), nn.BatchNorm1d(3)), r"'net\.3\.weight' is absent, but got \(3,\)"),
        (lambda: ibnn.convert(mlp()), "a plain network"),
        (lambda: mlp().to("meta"), "on the meta device"),
    ],
)
def test_another_architecture_is_refused_and_untouched(
    saved: tuple[ibnn.IBNN, Tensor, Path], net: Callable[[], nn.Module], words: str, copy: bool
) -> None:
    given = net()
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    with pytest.raises((ValueError, TypeError), match=words):
        load(saved[2], given, copy=copy)
    assert list(given.state_dict()) == list(before)
    assert all(t.is_meta or torch.equal(t, before[name]) for name, t in given.state_dict().items())


def test_another_order_of_layers_is_refused(tmp_path: Path) -> None:
    a, b = nn.Linear(5, 5), nn.Linear(5, 5)
    save_pretrained(ibnn.convert(nn.ModuleDict({"a": a, "b": b}), seed=0), tmp_path)
    with pytest.raises(ValueError, match=r"`net`.*order"):
        load(tmp_path, nn.ModuleDict({"b": b, "a": a}))


@pytest.mark.parametrize("place", [3, 200, -1])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_flipped_bit_is_found(saved: tuple[ibnn.IBNN, Tensor, Path], file: str, place: int) -> None:
    path = saved[2] / file
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=file):
        load(saved[2], fresh("mlp"))


def test_truncated_and_missing_files_are_named(saved: tuple[ibnn.IBNN, Tensor, Path]) -> None:
    folder = saved[2]
    weights, config = folder / "model.safetensors", folder / "config.json"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(DamagedError, match=r"model\.safetensors"):
        load(folder, fresh("mlp"))
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load(folder, fresh("mlp"))
    config.write_text(config.read_text()[:100])
    with pytest.raises(DamagedError, match=r"config\.json"):
        load(folder, fresh("mlp"))
    sealed.write_json(config, {"model_type": "bert"})
    with pytest.raises(ValueError, match=r"config\.json`"):
        load(folder, fresh("mlp"))
    config.unlink()
    with pytest.raises(FileNotFoundError, match="`directory`"):
        load(folder, fresh("mlp"))


WRONG = [None, True, -1, 10**5, 1e308, math.nan, "x", [1], {"x": 1}]


def leaves(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all keys in a config."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*place, key)
        yield from leaves(value, (*place, key))


def hostile(config: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any, dict[str, Any]]]:
    """Configs with one key that is missing, new, or has another value."""
    yield ("new",), 1, config | {"new": 1}
    for place in leaves(config):
        for value in ["missing", *WRONG]:
            edited = copy.deepcopy(config)
            inner = edited
            for key in place[:-1]:
                inner = inner[key]
            if value == "missing":
                del inner[place[-1]]
            else:
                inner[place[-1]] = value
            yield place, value, edited


def make_mlp() -> nn.Module:
    return ibnn.nets.make("mlp", 3, inputs=4, hidden=6, layers=2)


class TwoHeads(nn.Sequential):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return dict(zip("ab", super().forward(x).split([1, 2], 1), strict=True))


@pytest.mark.parametrize("kind", ["converted", "heads", "baseline"])
def test_any_wrong_value_in_a_config_is_one_clear_error(kind: str, tmp_path: Path) -> None:
    x, folder = torch.randn(3, 4), tmp_path / "save"
    net = TwoHeads(make_mlp()) if kind == "heads" else make_mlp()
    likelihood = ibnn.Heads({"a": ibnn.Gaussian(), "b": ibnn.Categorical()}) if kind == "heads" else ibnn.Categorical()
    model: Any = Ensemble([net, make_mlp()]) if kind == "baseline" else ibnn.convert(net, likelihood=likelihood)
    part = {"name": "mlp", "options": {"classes": 3, "inputs": 4, "hidden": 6, "layers": 2}}
    save_pretrained(model, folder, architecture=None if kind == "heads" else part)
    config = sealed.read_json(folder / "config.json")
    began = time.process_time()
    raw = []
    for place, value, edited in hostile(config):
        sealed.write_json(folder / "config.json", edited)
        try:
            load(folder, net if kind == "heads" else None).predict(x)
        except Exception as error:
            known = isinstance(error, ValueError | FileNotFoundError)
            if not known or not re.search(r"config\.json|Expected `", str(error)):
                raw.append((place, value, error))
    assert not raw
    assert time.process_time() - began < 60


def test_a_future_format_is_refused(saved: tuple[ibnn.IBNN, Tensor, Path]) -> None:
    edit(saved[2], format_version=2, ibnn_version="9.9")
    with pytest.raises(ValueError, match=r"config\.json` .*9\.9"):
        load(saved[2], fresh("mlp"))


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["IBNN_BOMB"],)


@pytest.mark.parametrize("dump", [pickle.dump, torch.save])
def test_a_pickle_is_refused_without_running_it(
    saved: tuple[ibnn.IBNN, Tensor, Path], dump: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, path = saved[2] / "exploded", saved[2] / "model.safetensors"
    monkeypatch.setenv("IBNN_BOMB", str(target))
    with path.open("wb") as file:
        dump(Bomb(), file)
    edit(saved[2], sha256=hashlib.sha256(path.read_bytes()).hexdigest())  # even with a matching checksum
    with pytest.raises(ValueError, match=r"model\.safetensors`"):
        load(saved[2], fresh("mlp"))
    assert not target.exists()
    with path.open("rb") as file:  # the bomb is live
        torch.load(file, weights_only=False) if dump is torch.save else pickle.load(file)
    assert target.exists()


def test_only_converted_networks_are_saved(tmp_path: Path) -> None:
    model = ibnn.convert(mlp(), seed=0)
    for wrong in (mlp(), nn.Sequential(model)):
        with pytest.raises(TypeError, match="`model`"):
            save_pretrained(wrong, tmp_path / "new")  # type: ignore[arg-type]
    ibnn.revert(model)
    with pytest.raises(TypeError, match="`model`"):
        save_pretrained(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="hub"):
        save_pretrained(ibnn.convert(mlp(), seed=0), tmp_path)


# ------------------------------------------------------------------------------------------------------- likelihoods


class Warm(ibnn.Categorical):
    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.tensor(temperature))

    def combine(self, draws: Tensor) -> Tensor:
        return super().combine(draws / self.temperature)


def test_a_likelihood_of_the_users_own_is_given_at_load(tmp_path: Path) -> None:
    model = ibnn.convert(mlp(), likelihood=Warm(3.0), seed=0).eval()
    save_pretrained(model, tmp_path)
    with pytest.raises(
        ValueError, match=r"an object of the saved class, Warm, but got NoneType\. Pass likelihood=Warm"
    ):
        load(tmp_path, mlp())
    with pytest.raises(ValueError, match=r"`likelihood`.*Warm"):
        load(tmp_path, mlp(), likelihood=ibnn.Categorical())
    given = Warm(1.0)
    again = load(tmp_path, mlp(), likelihood=given).eval()
    assert torch.equal(again(rows(5)), model(rows(5)))
    assert float(given.temperature) == 1.0  # an argument is not changed
    assert float(again.likelihood.temperature) == 3.0  # type: ignore[arg-type]


def test_every_named_likelihood_comes_back_by_itself(tmp_path: Path) -> None:
    for name, cls in ibnn.likelihood.LIKELIHOODS.items():
        save_pretrained(ibnn.convert(mlp(), likelihood=name, seed=0), tmp_path)
        assert type(load(tmp_path, mlp()).likelihood) is cls


def test_units_of_several_outputs_come_back(tmp_path: Path) -> None:
    """As `fit` chooses them where targets are far from unit size."""
    model = ibnn.convert(mlp(), likelihood="gaussian", components=2, seed=0)
    model.likelihood.location, model.likelihood.scale = torch.tensor([9.0, 0.0, 1e3]), torch.tensor([2.0, 1.0, 50.0])
    model.save_pretrained(tmp_path)
    again: Any = load(tmp_path, mlp())
    assert torch.equal(again.predict(rows(5)).mean, model.predict(rows(5)).mean)  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------- writing is atomic


@pytest.mark.parametrize("latents_only", [False, True])
def test_a_failed_write_leaves_the_old_save_and_no_rubbish(
    latents_only: bool, saved: tuple[ibnn.IBNN, Tensor, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, folder = saved
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    other = ibnn.convert(fresh("mlp"), seed=5)
    for function in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, lambda *_: (_ for _ in ()).throw(OSError("power cut")))
            with pytest.raises(OSError, match="power cut"):
                save_pretrained(other, folder, latents_only=latents_only)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert_same(model, load(folder, fresh("mlp")), x)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_permissions_are_what_the_umask_leaves(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        save_pretrained(ibnn.convert(fresh("mlp"), seed=0), tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {mode}


def _save_and_die(net: nn.Module, folder: Path, calls: int) -> None:
    """Saves, and is killed before the numbered change of a file's name."""
    replace = os.replace

    def counted(*args: Any) -> None:
        nonlocal calls
        if calls == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        calls -= 1
        replace(*args)

    os.replace = counted  # type: ignore[assignment]
    save_pretrained(ibnn.convert(net, seed=5), folder)


def killed_save(net: nn.Module, folder: Path, calls: int) -> None:
    process = multiprocessing.get_context("fork").Process(target=_save_and_die, args=(net, folder, calls))
    process.start()
    process.join(60)
    assert process.exitcode in (-signal.SIGKILL, 0)


@pytest.mark.parametrize(("calls", "again"), [(0, None), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3), (3, 2)])
def test_killed_saves_leave_the_old_model_or_the_new_one(
    calls: int, again: int | None, saved: tuple[ibnn.IBNN, Tensor, Path]
) -> None:
    """A second save that is killed, too, loses nothing either; the next one clears away what they left."""
    model, x, folder = saved
    other = ibnn.convert(fresh("mlp"), seed=5).eval()
    killed_save(fresh("mlp"), folder, calls)
    expected = other if calls >= 2 else model  # the second change of a name puts config.json in place
    assert_same(expected, load(folder, fresh("mlp")), x)
    if again is not None:
        last = nn.Sequential(*(copy.deepcopy(layer) for layer in plain(model)))
        killed_save(last, folder, again)
        finishes = calls == 2  # the first save; that is one change of a name
        expected = ibnn.convert(last, seed=5).eval() if again >= 2 + finishes else expected
        assert_same(expected, load(folder, fresh("mlp")), x)
    save_pretrained(model, folder)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    assert_same(model, load(folder, fresh("mlp")), x)


def test_two_processes_save_to_one_folder_in_turn(saved: tuple[ibnn.IBNN, Tensor, Path]) -> None:
    fork = multiprocessing.get_context("fork")
    savers = [fork.Process(target=_save_often, args=(saved[2], seed)) for seed in (1, 2)]
    for process in savers:
        process.start()
    for process in savers:
        process.join(60)
        assert process.exitcode == 0
    load(saved[2], fresh("mlp"))
    assert sorted(os.listdir(saved[2])) == ["config.json", "model.safetensors"]


def _save_often(folder: Path, seed: int) -> None:
    for _ in range(20):
        save_pretrained(ibnn.convert(mlp(), seed=seed), folder)


def test_a_pair_from_two_saves_is_refused(saved: tuple[ibnn.IBNN, Tensor, Path], tmp_path: Path) -> None:
    save_pretrained(ibnn.convert(fresh("mlp"), seed=5), tmp_path / "other")
    os.replace(tmp_path / "other" / "model.safetensors", saved[2] / "model.safetensors")
    with pytest.raises(DamagedError, match=r"model\.safetensors"):
        load(saved[2], fresh("mlp"))


def test_another_programs_config_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(FileExistsError, match="another program's file"):
        save_pretrained(ibnn.convert(mlp(), seed=0), tmp_path)
    assert os.listdir(tmp_path) == ["config.json"]
