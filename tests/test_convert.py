"""Plan, convert, revert: structure, names, identity, bad input, and what torch does to modules."""

import copy
import inspect
import io
import itertools
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import B, K
from reference import captured, close, converted, multiplied, row_by_row
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ibnn
from ibnn.latent import Latent


class Residual(nn.Module):
    """x + body(x), and a projection on the way out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 3, 1))
        self.shortcut, self.head = nn.Conv2d(3, 4, 1, stride=2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.shortcut(x + self.body(x)).mean((2, 3)))


class Shared(nn.Module):
    """One layer at two places, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again, self.head = self.first, nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.again(torch.tanh(self.first(x)))))


class TiedLinears(nn.Module):
    """Two layers with one weight and a latent each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class TiedEmbedding(nn.Module):
    """A language model whose last layer has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(9, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(x)))).mean(1)


class Containers(nn.Module):
    """Layers in a dict, in a list, and nested deeper, one of them in a module named `latent`."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"left": nn.Linear(6, 4), "right": nn.ModuleList([nn.Linear(6, 4)])})
        self.latent = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.GELU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.latent(self.parts["left"](x) * self.parts["right"][0](x)))


class Normalised(nn.Module):
    """With running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


NETS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(6, 2),
    "Sequential": lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 2)),
    "Residual": Residual,
    "Shared": Shared,
    "TiedLinears": TiedLinears,
    "TiedEmbedding": TiedEmbedding,
    "Containers": Containers,
    "Normalised": Normalised,
}
LATENTS = {
    "Linear": [""],
    "Sequential": ["0", "3"],
    "Residual": ["body.0", "body.2", "shortcut", "head"],
    "Shared": ["first", "head"],
    "TiedLinears": ["first", "second", "head"],
    "TiedEmbedding": ["hidden", "head"],
    "Containers": ["parts.left", "parts.right.0", "latent.0.0", "head"],
    "Normalised": ["conv", "head"],
}


def make(name: str) -> tuple[nn.Module, Tensor]:
    """A net in float64 and a batch for it."""
    x = torch.randn(B, 3, 6, 6, dtype=torch.float64)
    if name == "TiedEmbedding":
        x = torch.randint(9, (B, 5))
    elif name not in ("Residual", "Normalised"):
        x = x[:, 0, 0]
    return NETS[name]().double(), x


def hooks_of(module: nn.Module) -> list[list[Any]]:
    """Everything hooked to a module."""
    return [list(hooks.items()) for key, hooks in sorted(vars(module).items()) if "hooks" in key and hooks is not None]


def anatomy(net: nn.Module) -> list[Any]:
    """All of a net but its values: modules, their attributes, modes and hooks, the identity of its tensors."""
    modules = [(n, id(m), type(m), m.training, sorted(vars(m)), hooks_of(m)) for n, m in net.named_modules()]
    tensors = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    return [*modules, [(name, id(tensor)) for name, tensor in tensors]]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


# --- plan ---------------------------------------------------------------------------------------


def test_plan_counts_the_papers_nets() -> None:
    lenet = nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.Conv2d(16, 120, 4)),
        *(nn.Flatten(), nn.Linear(120, 64), nn.Linear(64, 10)),
    )
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    vgg = nn.ModuleList([nn.Conv2d(i, o, 3, device="meta") for i, o in itertools.pairwise(widths)])
    vgg.extend(nn.Linear(512, o, device="meta") for o in (512, 512, 10))
    assert (ibnn.plan(lenet).nodes, ibnn.plan(lenet).weights) == (207, 41_806)
    assert (ibnn.plan(vgg).nodes, round(ibnn.plan(vgg).weights / 1e6)) == (5_251, 15)


def test_plan_says_what_is_skipped_and_why() -> None:
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.RMSNorm(4), nn.PReLU(4), nn.ReLU(), nn.Linear(4, 2))
    plan = ibnn.plan(net, exclude=["5", "2"])
    assert [(e.name, e.type, e.nodes, e.weights) for e in plan.layers] == [("1", "Linear", 4, 20)]
    assert [(e.name, e.reason.split(":")[0]) for e in plan.skipped] == [
        ("0", "looks rows up"),
        ("2", "normalisation"),
        ("3", "no latent for PReLU"),
        ("5", "excluded"),
    ]
    lines = str(plan).splitlines()
    assert len(lines) == 1 + 1 + 4 + 1
    assert re.search(r"^5 +Linear +skipped +excluded$", lines[5])
    assert lines[-1].startswith(f"4 nodes, {plan.weights:,} weights")


class Owner(nn.Linear):
    """A layer that has an attribute `latent` of its own."""

    latent = 3


def test_an_attribute_called_latent_is_not_overwritten() -> None:
    (skipped,) = ibnn.plan(nn.Sequential(Owner(3, 2), nn.Linear(2, 2))).skipped
    assert (skipped.name, skipped.reason) == ("0", "has an attribute `latent` of its own")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["body.0", "body.2", "shortcut", "head"]),
        ({"include": "head"}, ["head"]),
        ({"include": "body"}, ["body.0", "body.2"]),
        ({"include": ["b*.0", nn.Linear]}, ["body.0", "head"]),
        ({"include": nn.Conv2d, "exclude": "body.2"}, ["body.0", "shortcut"]),
        ({"exclude": ["body", nn.Linear]}, ["shortcut"]),
    ],
)
def test_include_and_exclude(options: dict[str, Any], names: list[str]) -> None:
    net = Residual()
    assert [entry.name for entry in ibnn.plan(net, **options).layers] == names
    model = converted(net, **options)
    assert list(model.latents) == names
    assert model.nodes == ibnn.plan(net, **options).nodes


@pytest.mark.parametrize("name", NETS)
def test_plan_touches_nothing(name: str) -> None:
    net, _ = make(name)
    before, values = anatomy(net), copied(net.state_dict())
    ibnn.plan(net)
    assert anatomy(net) == before
    assert equal(net.state_dict(), values)


# --- identity and structure ----------------------------------------------------------------------


@pytest.mark.parametrize("copy_net", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_z_of_one_is_the_net_bit_for_bit(name: str, copy_net: bool) -> None:
    net, x = make(name)
    plain = copy.deepcopy(net)
    model = converted(net, copy=copy_net, components=4)
    assert model.training
    assert list(model.latents) == LATENTS[name]
    model.set_posterior(mean=1.0, std=0.0)
    assert torch.equal(model(x), plain(x))
    assert torch.equal(model.net(x), plain(x))
    assert all(torch.equal(v, model.net.state_dict()[n]) for n, v in plain.state_dict().items())  # statistics too
    model.eval()
    plain.eval()
    assert all(torch.equal(row, plain(x)) for row in model.draw_logits(x, samples=2))
    assert torch.equal(model(x), plain(x))  # the mean of four equal outputs
    model.eval_samples = 0
    assert torch.equal(model(x), plain(x))


def test_init_std_of_zero_starts_every_component_at_the_net() -> None:
    net, x = make("Residual")
    model = converted(net, init_std=0)
    assert all(torch.equal(model.component(k)(x), net(x)) for k in range(K))
    assert bool((model.posterior().std > 0).all())  # only the means start alike


@pytest.mark.parametrize("name", [name for name in NETS if name != "Normalised"])
def test_a_training_forward_runs_each_row_with_its_own_z(name: str) -> None:
    net, x = make(name)
    model = converted(net).train()
    with captured(model) as met:
        output = model(x)
    assert close(output, row_by_row(net, {layer: z[0] for layer, z in met.items()}, x))
    assert not close(output, net(x))
    calls = [2 if (name, layer) == ("Shared", "first") else 1 for layer in met]
    assert [len(z) for z in met.values()] == calls
    assert all(torch.equal(z[0], z[-1]) for z in met.values())  # the same draw at every place
    assert model.nodes == len(torch.cat([z[0] for z in met.values()], 1).unique()) / B  # no two nodes share one
    assert not close(model(x), output)  # the next batch has its own


@pytest.mark.parametrize("name", NETS)
def test_draws_and_components_are_plain_networks(name: str) -> None:
    net, x = make(name)
    net.eval()
    model = converted(net)
    rows = model.draw_logits(x, samples=2)
    with captured(model) as met:
        assert torch.equal(model.draw_logits(x, samples=2), rows)
    for j, row in enumerate(rows):
        k, s = divmod(j, 2)
        z = {layer: calls[j * len(calls) // len(rows)] for layer, calls in met.items()}
        assert close(multiplied(net, z)(x), row)
        assert close(model.draw(component=k, index=s)(x), row)
    weights = net.state_dict()
    for k in range(K):
        component = model.component(k)
        assert type(component) is type(net)
        assert [(n, type(m), sorted(vars(m)), hooks_of(m)) for n, m in component.named_modules()] == [
            (n, type(m), sorted(vars(m)), hooks_of(m)) for n, m in net.named_modules()
        ]
        assert component.state_dict().keys() == weights.keys()
        for layer, latent in model.latents.items():
            mean = latent.mean[k].detach()
            folded, plain = component.get_submodule(layer).weight, net.get_submodule(layer).weight
            assert torch.equal(folded, plain * mean.reshape(-1, *[1] * (plain.dim() - 2)))
        if name == "TiedEmbedding":
            assert torch.equal(component.embedding.weight, net.embedding.weight)
    model.set_posterior(std=0.0)
    assert close(model.draw_logits(x, samples=1), torch.stack([model.component(k)(x) for k in range(K)]))


def test_hooks_of_the_user_run_once_and_in_order() -> None:
    log: list[str] = []

    def pre(label: str) -> Callable[..., tuple[Tensor]]:
        return lambda layer, args: log.append(label) or (args[0] + 1,)

    def post(label: str) -> Callable[..., Tensor]:
        return lambda layer, args, output: log.append(label) or output * 3

    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    net[0].register_forward_pre_hook(pre("pre"))
    net[0].register_forward_hook(post("post"))
    net[0].register_full_backward_hook(lambda *_: log.append("backward"))
    model = converted(net, copy=False).train()
    net[0].register_forward_pre_hook(pre("late pre"))
    net[0].register_forward_hook(post("late post"))
    x = torch.randn(B, 4, dtype=torch.float64, requires_grad=True)
    with captured(model) as met:
        output = model(x)
    assert log == ["pre", "late pre", "post", "late post"]
    output.sum().backward()
    assert log[4:] == ["backward"]
    z, z_head = met["0"][0], met["1"][0]
    hidden = 9 * nn.functional.linear((x + 2) * z, net[0].weight, net[0].bias)  # multiplied last
    assert close(output, nn.functional.linear(hidden * z_head, net[1].weight, net[1].bias))
    log.clear()
    drawn = model.draw(component=0)(x)
    assert log == ["pre", "late pre", "post", "late post"]
    assert drawn.shape == output.shape
    hooks = [len(hooks) for hooks in hooks_of(ibnn.revert(model)[0])]
    assert sum(hooks) == 5


def test_modes_of_modules_are_kept() -> None:
    net = Normalised().train()
    net.norm.eval()  # frozen statistics
    model = converted(net, copy=False)
    assert (net.training, net.conv.training, net.norm.training, net.head.training) == (True, True, False, True)
    assert model.training
    assert not any(module.training for module in converted(Normalised().eval()).modules())


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS)
def test_plain_weights_load_before_or_after(name: str) -> None:
    net, x = make(name)
    weights = {n: v + torch.randn_like(v) if v.is_floating_point() else v for n, v in net.state_dict().items()}
    weights = {n: v.abs() if "running_var" in n else v for n, v in weights.items()}
    if name.startswith("Tied"):  # one tensor under two names
        first, second = ("first", "second") if name == "TiedLinears" else ("embedding", "head")
        weights[f"{second}.weight"] = weights[f"{first}.weight"]
    elif name == "Shared":
        weights |= {n.replace("first", "again"): v for n, v in weights.items() if "first" in n}
    after = converted(net)
    names = [n for n in after.net.state_dict() if n not in weights]
    assert [n for n in after.net.state_dict() if n in weights] == list(weights)
    assert all(re.search(r"(^|\.)latent\.(mean|rho)$", n) for n in names)
    result = after.net.load_state_dict(weights, strict=False)
    assert sorted(result.missing_keys) == sorted(names)
    assert result.unexpected_keys == []
    net.load_state_dict(weights)
    before = converted(net)
    assert equal(before.state_dict(), after.state_dict())
    assert torch.equal(before(x), after(x))
    assert torch.equal(before.eval()(x), after.eval()(x))


@pytest.mark.parametrize("name", NETS)
def test_without_copy_weights_keep_their_identity(name: str) -> None:
    net, _ = make(name)
    before = dict(net.state_dict(keep_vars=True))
    model = converted(net, copy=False)
    assert model.net is net
    after = net.state_dict(keep_vars=True)
    assert all(after[n] is tensor for n, tensor in before.items())
    assert {id(p) for p in model.parameters()} >= {id(p) for p in before.values() if isinstance(p, nn.Parameter)}


@pytest.mark.parametrize("name", NETS)
def test_with_copy_the_original_is_untouched(name: str) -> None:
    net, x = make(name)
    before, values = anatomy(net), copied(net.state_dict())
    model = converted(net)
    optimiser = torch.optim.SGD(model.parameter_groups(lr=0.1), lr=0.1)
    model(x).square().mean().backward()
    optimiser.step()
    model.component(0)
    ibnn.revert(model)
    assert anatomy(net) == before
    assert equal(net.state_dict(), values)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in net.parameters()}


@pytest.mark.parametrize("name", NETS)
def test_revert_gives_back_the_very_net(name: str) -> None:
    net, x = make(name)
    net.eval()
    before, values, plain = anatomy(net), copied(net.state_dict()), net(x)
    model = converted(net, copy=False)
    model(x)
    model.component(1)
    assert ibnn.revert(model) is net
    assert anatomy(net) == before
    assert equal(net.state_dict(), values)
    assert torch.equal(net(x), plain)
    assert not any(isinstance(module, Latent) for module in net.modules())
    assert list(converted(net).latents) == LATENTS[name]  # and it can be converted again
    with pytest.raises(RuntimeError, match="reverted"):
        model(x)


# --- bad input ----------------------------------------------------------------------------------


def four_parts(argument: str, expected: str, got: str, remedy: str) -> str:
    """A pattern for messages that name the argument, what was expected, what came and what to do."""
    return rf"^Expected `{re.escape(argument)}` to be .*{expected}.*, but got .*{got}.*\. .*{remedy}"


def refuses(argument: str, value: object, expected: str, remedy: str, got: str | None = None) -> Any:
    """A bad value of one of convert's options."""
    pattern = four_parts(argument, expected, re.escape(repr(value)) if got is None else got, remedy)
    return pytest.param({argument: value}, pattern, id=f"{argument}={value!r}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[refuses("components", v, "an integer of at least 1", "components=8") for v in (0, -1, 2.0, True, "8", None)],
        *[refuses("prior_std", v, "a number above 0", "prior_std=0.3") for v in (0, -0.1, float("nan"), "1")],
        refuses("prior_std", float("inf"), "a number above 0", "prior_std=0.3"),
        *[refuses("init_std", v, "a number of at least 0", "init_std=0") for v in (-0.1, float("nan"), float("inf"))],
        refuses("kl", "pair", "one of mean, components, pairwise, montecarlo", "'pairwise'"),
        refuses("likelihood", "gausian", "one of categorical, bernoulli, gaussian", "'gaussian'"),
        refuses("likelihood", 3, "a name, a Likelihood object, or a dict of them", "categorical", got="int"),
        refuses("include", "haed", "match layers", "Did you mean 'head'"),
        refuses("include", 3, "names, globs or classes", r'\["conv1"\]'),
        refuses("include", ["head", nn.Conv1d], "match layers", "Did you mean", got="Conv1d"),
        refuses("include", "norm", "match layers", "lists the layers"),  # is there, but has no input weights
        refuses("exclude", "cnov", "match layers", "Did you mean 'conv'"),
        *[refuses("seed", v, "an integer in 0", "seed=0") for v in (-1, 2**63)],
        pytest.param(
            {"exclude": "*"}, four_parts("net", "layers to convert", "conv .excluded.", "register_layer"), id="all out"
        ),
    ],
)
def test_bad_options_are_refused_before_anything_changes(options: dict[str, Any], message: str) -> None:
    net = Normalised()
    before, values, state = anatomy(net), copied(net.state_dict()), torch.get_rng_state()
    error = TypeError if options.get("likelihood") == 3 else ValueError
    with pytest.raises(error, match=message):
        ibnn.convert(net, copy=False, **options)
    assert anatomy(net) == before
    assert equal(net.state_dict(), values)
    assert torch.equal(torch.get_rng_state(), state)


def test_help_spells_out_every_option() -> None:
    with pytest.raises(TypeError, match="component"):
        ibnn.convert(nn.Linear(2, 2), component=3)  # type: ignore[call-arg]
    kinds = {parameter.kind for parameter in inspect.signature(ibnn.convert).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # older torch calls them a new feature
        return nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        net: nn.Module = torch.jit.trace(nn.Linear(3, 2), torch.ones(1, 3))  # type: ignore[no-untyped-call]
        return net


def quantised() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-untyped-call]
        return made


NO_LAYERS = "a network with layers to convert"
CONVERTED = four_parts("net", "a plain network", "converted before .*0.latent", "revert")


@pytest.mark.parametrize(
    ("make_net", "error", "message"),
    [
        (nn.ReLU, ValueError, four_parts("net", NO_LAYERS, "no weights at all", "register_layer")),
        (lambda: nn.LayerNorm(2), ValueError, four_parts("net", NO_LAYERS, r"\(net\) .norm", "register_layer")),
        (lazy, ValueError, four_parts("net", "materialised", "lazy.*0.weight", r"net\(x\)")),
        (lambda: ibnn.convert(nn.Sequential(nn.Linear(3, 2))), ValueError, CONVERTED),
        (lambda: ibnn.convert(nn.Sequential(nn.Linear(3, 2))).net, ValueError, CONVERTED),
        (lambda: nn.Linear, TypeError, four_parts("net", "an nn.Module", "type", "network itself")),
        (scripted, TypeError, four_parts("net", "an nn.Module in plain Python", "scripted", "Convert first")),
        (quantised, TypeError, "`net`.*'0'"),
    ],
    ids=["no weights", "no layers", "lazy", "model", "converted net", "class", "scripted", "quantised"],
)
@pytest.mark.parametrize("function", [ibnn.plan, lambda net: ibnn.convert(net, copy=False)], ids=["plan", "convert"])
def test_bad_nets_are_refused(
    function: Callable[[Any], object], make_net: Callable[[], Any], error: type[Exception], message: str
) -> None:
    net = make_net()
    before = anatomy(net) if isinstance(net, nn.Module) else None
    with pytest.raises(error, match=message):
        function(net)
    assert before is None or anatomy(net) == before


def test_weights_on_the_meta_device_can_be_planned_but_not_converted() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 2))
    assert ibnn.plan(net).nodes == 3
    before = anatomy(net)
    with pytest.raises(
        ValueError, match=four_parts("net", "with weights", r"\['0.weight', '0.bias'\] on", "load_state")
    ):
        ibnn.convert(net, copy=False)
    assert anatomy(net) == before


def test_revert_refuses_what_is_no_model() -> None:
    with pytest.raises(TypeError, match=four_parts("model", "an IBNN", "Linear", "model itself")):
        ibnn.revert(nn.Linear(2, 2))


X, Y = torch.ones(4, 3, 6, 6), torch.tensor([0, 1, 1, 0])
ROWS = four_parts("x", "at least one row", r"shape \(0, 3, 6, 6\)", "first dimension")
NAN = X.clone()
NAN[2, 1, 0, 0] = float("nan")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.elbo(X, Y + 1, n_data=9), ValueError, four_parts("y", "0 … 1", "labels from 1 to 2", "Renumber")),
        (lambda m: m.elbo(X, Y - 1, n_data=9), ValueError, four_parts("y", "0 … 1", "labels from -1", "Renumber")),
        (lambda m: m.elbo(X, Y.float(), n_data=9), TypeError, four_parts("y", "integer", "torch.float32", "long")),
        (lambda m: m.elbo(X, Y.bool(), n_data=9), TypeError, four_parts("y", "integer", "torch.bool", "long")),
        (lambda m: m.elbo(X, Y[:3], n_data=9), ValueError, four_parts("y", "4 rows", r"shape \(3,\)", "every row")),
        (lambda m: m.elbo(X, Y[:, None], n_data=9), ValueError, four_parts("y", r"\(4,\)", r"\(4, 1\)", "one class")),
        (lambda m: m.elbo(X, Y, n_data=3), ValueError, four_parts("n_data", "at least the 4", "3", "training set")),
        (
            lambda m: m.elbo(X, Y, n_data=9, samples=0),
            ValueError,
            four_parts("samples", "at least 1", "0", "samples=1"),
        ),
        (lambda m: m.elbo(X[:0], Y[:0], n_data=9), ValueError, ROWS),
        (lambda m: m.train()(X[:0]), ValueError, ROWS),
        (lambda m: m.eval()(X[:0]), ValueError, ROWS),
        (lambda m: m.draw_logits(X[:0]), ValueError, ROWS),
        (lambda m: m.predict(X[:0]), ValueError, ROWS),
        (lambda m: m.predict([]), ValueError, four_parts("x", "at least one row", "without tensors", "torch.tensor")),
        (lambda m: m.predict(iter([])), ValueError, four_parts("x", "one batch", "empty loader", "with data")),
        (lambda m: m.predict(NAN), ValueError, four_parts("input 0", "free of NaN", "row 2", "drop that row")),
        (lambda m: m.predict({"x": NAN}), ValueError, four_parts("x", "free of NaN", "row 2", "drop that row")),
        (lambda m: m.predict(iter([X, NAN])), ValueError, four_parts("input 0", "free of NaN", "row 6", "drop")),
        (lambda m: m.predict(X, samples=0), ValueError, four_parts("samples", "at least 1", "0", "samples=5")),
        (lambda m: m.component(K), IndexError, four_parts("k", "0 … 2", "3", "from 0")),
        (lambda m: m.draw(component=-1), IndexError, four_parts("components", "0 … 2", "-1", "from 0")),
        (lambda m: m.set_posterior(mean=2.0, std=-0.1), ValueError, four_parts("std", "not neg", "-0.1", "0 for no")),
        (lambda m: m.reseed(-1), ValueError, four_parts("seed", "an integer in 0", "-1", "seed=0")),
    ],
    ids=itertools.count(),
)
def test_after_an_error_the_model_can_go_on(
    call: Callable[[ibnn.IBNN], object], error: type[Exception], message: str
) -> None:
    model = converted(Normalised(), likelihood="categorical").train()
    model(X)  # the count of examples has moved
    before, count = anatomy(model), int(model.examples)
    with pytest.raises(error, match=message):
        call(model)
    training = model.training
    model.train()
    assert training or anatomy(model) == before
    assert int(model.examples) == count
    assert all(latent.current_pass.z is None for latent in model.latents.values())


# --- what torch does to modules -------------------------------------------------------------------


def _copies(how: str, model: ibnn.IBNN) -> ibnn.IBNN:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = converted(type(model.net)().double(), seed=99)
    assert not torch.equal(other.posterior().mean, model.posterior().mean)
    other.load_state_dict(torch.load(file))
    return other


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
@pytest.mark.parametrize("name", ["Residual", "Shared", "TiedEmbedding", "Normalised"])
def test_copies_go_on_where_the_model_is_and_on_their_own(how: str, name: str) -> None:
    net, x = make(name)
    model = converted(net).train()
    model.parameter_groups(lr=0.1)
    model(x).square().sum().backward()  # a copy is made of a model in use
    twin = _copies(how, model)
    assert equal(twin.state_dict(), model.state_dict())
    assert torch.equal(twin.train()(x), model(x))
    assert torch.equal(twin.eval()(x), model.eval()(x))
    assert torch.equal(twin.component(1)(x), model.component(1)(x))
    plain, rows = net.eval()(x), model.draw_logits(x)
    twin.load_state_dict({**twin.state_dict(), **{f"net.{n}": v for n, v in net.state_dict().items()}})
    twin.set_posterior(mean=1.0, std=0.0)
    assert all(torch.equal(row, plain) for row in twin.draw_logits(x))
    assert torch.equal(model.draw_logits(x), rows)  # hooks of the copy belong to the copy


def test_a_copy_made_during_a_forward_pass_is_at_rest() -> None:
    net, x = make("Shared")
    model, copies = converted(net).train(), []
    model(x)
    handle = model.net.head.register_forward_hook(lambda *_: copies.append(copy.deepcopy(model.net)))
    model(x)
    handle.remove()
    assert [latent.current_pass.z for latent in copies[0].modules() if isinstance(latent, Latent)] == [None, None]
    assert torch.equal(copies[0](x), model.net(x))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float64, 1e-11),
        (torch.float32, 1e-5),
        pytest.param(torch.bfloat16, 5e-2, marks=pytest.mark.bf16),
        (torch.float16, 1e-2),
    ],
)
@pytest.mark.parametrize("name", ["Sequential", "Residual", "Normalised"])
def test_dtypes(name: str, dtype: torch.dtype, tolerance: float) -> None:
    net, x = make(name)
    net.float()
    model = {torch.bfloat16: nn.Module.bfloat16, torch.float16: nn.Module.half}.get(dtype, lambda m: m.to(dtype))(
        converted(net).train()
    )
    assert {p.dtype for p in model.net.parameters()} == {dtype}
    x = x.to(dtype)
    output = model(x)
    assert output.dtype == dtype
    output.float().square().mean().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.net.parameters())
    assert torch.allclose(
        model.draw(component=1)(x).double(), model.draw_logits(x, samples=1)[1].double(), atol=tolerance
    )
    model.set_posterior(mean=1.0, std=0.0)
    plain = copy.deepcopy(ibnn.revert(copy.deepcopy(model)))
    assert torch.equal(model(x), plain(x))
    assert all(torch.equal(row, plain.eval()(x)) for row in model.draw_logits(x))


@pytest.mark.parametrize("name", ["Residual", "Normalised"])
def test_channels_last(name: str) -> None:
    net, x = make(name)
    model = converted(net).train()
    twin = copy.deepcopy(model).to(memory_format=torch.channels_last)
    last = x.contiguous(memory_format=torch.channels_last)
    seen: list[bool] = []
    layer = next(m for m in twin.net.modules() if isinstance(m, nn.Conv2d))
    layer.register_forward_hook(
        lambda module, args, output: seen.append(args[0].is_contiguous(memory_format=torch.channels_last))
    )
    assert close(twin(last), model(x))
    assert close(twin.draw_logits(last), model.draw_logits(x))
    assert set(seen) == {True}  # z does not undo the layout
    plain = copy.deepcopy(net).to(memory_format=torch.channels_last)
    for m in (twin, plain):
        m.load_state_dict({f"net.{n}" if m is twin else n: v for n, v in net.state_dict().items()}, strict=False)
    twin.set_posterior(mean=1.0, std=0.0)
    assert torch.equal(twin(last), plain(last))


def test_print_tells_the_truth() -> None:
    model = ibnn.convert(Normalised(), components=3, prior_std=0.25, kl="pairwise", seed=0)
    model.eval_samples, model.eval_seed = 2, 7
    text = str(model)
    mean_std = round(float(model.posterior().std.detach().mean()), 4)
    assert "components=3, nodes=7, prior_std=0.25, kl_kind='pairwise', draws='channel'" in text
    assert f"mean_std={mean_std}, temperature=1.0, eval_samples=2" in text
    assert [line.strip() for line in text.splitlines() if "Latent" in line] == [
        "(latent): Latent(components=3, nodes=3)",
        "(latent): Latent(components=3, nodes=4)",
    ]
    assert "Latent" not in str(model.component(0))
    assert str(ibnn.revert(model)) == str(Normalised())


# --- gradient checkpointing -----------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Runs its middle again in the backward pass, if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.again = False
        self.middle = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh())
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.middle, x, use_reentrant=False) if self.again else self.middle(x))


def _one(model: ibnn.IBNN, x: Tensor) -> None:
    model(x).square().sum().backward()


def _two_in_order(model: ibnn.IBNN, x: Tensor) -> None:
    first, second = model(x).square().sum(), model(2 * x).square().sum()
    first.backward()
    second.backward()


def _two_reversed(model: ibnn.IBNN, x: Tensor) -> None:
    first, second = model(x).square().sum(), model(2 * x).square().sum()
    second.backward()
    first.backward()


def _two_in_one(model: ibnn.IBNN, x: Tensor) -> None:
    (model(x).square().sum() * model(2 * x).square().sum()).backward()


def _eval_between(model: ibnn.IBNN, x: Tensor) -> None:
    loss = model(x).square().sum()
    model.eval()(x)
    model.train()
    loss.backward()


def _draws(model: ibnn.IBNN, x: Tensor) -> None:
    model.draw_logits(x, samples=2).square().sum().backward()


def _elbo(model: ibnn.IBNN, x: Tensor) -> None:
    model.elbo(x, x[:, :2], n_data=20, samples=2).loss.backward()


def _frozen_latents(model: ibnn.IBNN, x: Tensor) -> None:
    for latent in model.latents.values():
        latent.requires_grad_(False)
    _one(model, x)


def _net_alone_after(model: ibnn.IBNN, x: Tensor) -> None:
    _one(model, x)
    model.zero_grad()
    model.net(x).square().sum().backward()


@pytest.mark.parametrize(
    "steps",
    [
        *(_one, _two_in_order, _two_reversed, _two_in_one, _eval_between),
        *(_draws, _elbo, _frozen_latents, _net_alone_after),
    ],
)
def test_checkpointing_changes_no_gradient(steps: Callable[[ibnn.IBNN, Tensor], None]) -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    plain = converted(Checkpointed().double()).train()
    twin = copy.deepcopy(plain)
    twin.net.again = True
    for model in (plain, twin):
        steps(model, x)
    for (name, a), b in zip(plain.named_parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name
    assert any(p.grad is not None and bool(p.grad.any()) for p in twin.net.middle.parameters())
