"""Layers whose weight is read although they are not called: listed by `plan`, refused by the model."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import B
from peak import Peak
from reference import captured, close, converted, multiplied, row_by_row
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import ibnn
from ibnn.budget import saved_bytes
from ibnn.inputs import tensors
from ibnn.layers.bypass import bypassed
from ibnn.layers.explain import out_of_memory


class Reads(nn.Module):
    """Normalises, uses the weight of `fc` in some way, and ends in a layer that is called as it should be."""

    def __init__(self, how: Callable[[nn.Linear, Tensor], Tensor], wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.how, self.norm, self.fc, self.head = how, nn.BatchNorm1d(4), wrap(nn.Linear(4, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.how(self.fc, self.norm(x))))


BEHIND = {  # ways past the latent of `fc`
    "F.linear": lambda fc, x: F.linear(x, fc.weight, fc.bias),
    "F.linear, keyword": lambda fc, x: F.linear(x, weight=fc.weight),
    "@": lambda fc, x: x @ fc.weight.t(),
    "einsum": lambda fc, x: torch.einsum("bi,oi->bo", x, fc.weight),
    "list": lambda fc, x: x @ torch.cat([fc.weight, fc.weight])[:4],
    "forward": lambda fc, x: fc.forward(x),
    "data": lambda fc, x: x @ fc.weight.data,
    "called and read": lambda fc, x: F.linear(torch.tanh(fc(x)), fc.weight.t()),
    "read and called": lambda fc, x: fc(x @ fc.weight),
}
HONEST = {  # nothing is lost
    "called": lambda fc, x: fc(x),
    "shape": lambda fc, x: fc(x) * fc.weight.shape[0] / fc.weight.size(1),
    "dtype": lambda fc, x: fc(x.to(fc.weight.dtype).to(fc.weight.device)),
    "unused": lambda fc, x: x,
}
WRAPS = {"plain": lambda layer: layer, "weight_norm": parametrizations.weight_norm}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def hooks(net: nn.Module) -> int:
    modules = [module for module in net.modules() if not isinstance(module, ibnn.Latent)]
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in modules)


@pytest.fixture(params=WRAPS)
def wrap(request: pytest.FixtureRequest) -> Callable[[nn.Module], nn.Module]:
    return WRAPS[request.param]


@pytest.mark.parametrize("how", HONEST)
def test_no_honest_layer_is_accused(how: str, wrap: Callable) -> None:
    net, x = Reads(HONEST[how], wrap), torch.randn(B, 4)
    model = converted(net).train()
    model(x)
    model.eval()(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", BEHIND)
def test_the_first_forward_refuses(how: str, wrap: Callable, training: bool) -> None:
    net, x = Reads(BEHIND[how], wrap), torch.randn(B, 4)
    model = converted(net).train(training)
    message = (
        r"Expected `net` to be a network that calls the layers it converts, but got one that reads the weight of "
        r"\['fc'\] .*\. Leave them out: convert\(\.\.\., exclude=\['fc'\]\)"
    )
    for _ in range(2):  # an error is no reason to stop looking
        with pytest.raises(RuntimeError, match=message):
            model(x)
        with pytest.raises(RuntimeError, match=message):
            model.predict(x)
    assert int(model.examples) == 0
    assert hooks(model.net) == 0
    excluded = converted(net, exclude=["fc"]).train(training)
    assert excluded(x).shape == (B, 2)


class OnlyInEval(nn.Module):
    """Calls its layer in train mode and reads its weight in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if self.training else F.linear(x, self.fc.weight, self.fc.bias)


def test_both_modes_are_watched_until_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = converted(OnlyInEval()).train(), torch.randn(B, 4)
    model(x)
    with pytest.raises(RuntimeError, match=r"reads the weight of \['fc'\]"):
        model.eval()(x)
    with pytest.raises(RuntimeError, match=r"reads the weight of \['fc'\]"):
        model.train().draw_logits(x)
    monkeypatch.setattr("ibnn.network.bypassed", None)
    model(x)  # train mode was found to be well: no more watching


# --- the watch itself -----------------------------------------------------------------------------


def test_bypassed_names_exactly_what_was_read_behind_a_layers_back() -> None:
    net = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("called", "read", "unused", "tied", "outside")})
    net["owner"] = nn.Embedding(3, 3)
    net["tied"].weight = net["owner"].weight
    with bypassed(net, ["called", "read", "unused", "tied"]) as names:
        x = net["called"](torch.randn(2, 3)) @ net["read"].weight @ net["outside"].weight
        net["owner"](torch.tensor([0, 1])) + x
        assert not names  # known on leaving
    assert names == {"read"}
    assert hooks(net) == 0


def test_bypassed_cleans_up_after_an_error() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ZeroDivisionError), bypassed(net, ["0"]):
        1 / 0  # noqa: B018
    assert hooks(net) == 0


def test_tensors_come_in_order_out_of_nests() -> None:
    a, b, c = torch.zeros(3)
    assert [id(t) for t in tensors([{"x": a, "y": None}, (1, [b]), "text", c])] == [id(a), id(b), id(c)]
    assert list(tensors(3)) == []


# --- attention: torch reads weights past their layers, and has a fast path -------------------------


class Attends(nn.Module):
    """Self-attention and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0].mean(1))


class Encodes(nn.Module):
    """Layers of a Transformer and a linear head."""

    def __init__(self, stack: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2) if stack else layer
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=mask)[:, 0])


OUT_PROJ = "read by nn.MultiheadAttention without a call: its nodes are in the latent there"
ATTENTION = {"exclude": nn.MultiheadAttention}  # whose own latents are tested in test_attention


@pytest.mark.parametrize(
    ("make", "layers", "skipped"),
    [
        (Attends, ["head"], ["attention.out_proj"]),
        (Encodes, ["encoder.linear1", "encoder.linear2", "head"], ["encoder.self_attn.out_proj"]),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_attention_keeps_every_latent(
    make: Callable[[], nn.Module], layers: list[str], skipped: list[str], grad: bool
) -> None:
    net, x = make().double().eval(), torch.randn(B, 5, 6, dtype=torch.float64)
    plan = ibnn.plan(net, **ATTENTION)
    assert [entry.name for entry in plan.layers] == layers
    assert [entry.name for entry in plan.skipped if entry.reason == OUT_PROJ] == skipped
    model = converted(net, **ATTENTION)
    with torch.set_grad_enabled(grad):
        plain, rows = net(x), model.draw_logits(x, samples=2)
        assert torch.equal(model.draw_logits(x, samples=2), rows)  # watched or not
        with captured(model) as met:
            model.draw_logits(x, samples=2)
        for j, row in enumerate(rows):
            assert close(row, multiplied(net, {name: z[j] for name, z in met.items()})(x))
            assert close(row, model.draw(component=j // 2, index=j % 2)(x))
            assert (row - plain).abs().max() > 1e-3
        only_inner = copy.deepcopy(model)
        if "encoder.linear1" in layers:  # noise in the inner layers alone reaches the output too
            only_inner.latents["head"].set(mean=torch.tensor(1.0), std=torch.tensor(0.0))
            assert (only_inner.draw_logits(x, samples=1) - plain).abs().min(0).values.max() > 1e-4
        fresh = converted(net, **ATTENTION)
        fresh.set_posterior(mean=1.0, std=0.0)
        same = torch.equal if grad else close  # without gradients the plain net may take torch's fast path
        assert all(same(row, plain) for row in fresh.draw_logits(x, samples=1))
        model.train()
        with captured(model) as met:
            output = model(x)
        assert close(output, row_by_row(net.train(), {name: z[0] for name, z in met.items()}, x))
        model.set_posterior(mean=1.0, std=0.0)
        assert torch.equal(model(x), net(x))
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_padding_of_a_transformer_goes_through_its_fast_path() -> None:
    net, x = Encodes(stack=True).eval(), torch.randn(B, 5, 6)
    mask = torch.arange(5).expand(B, 5) >= torch.tensor([[5], [3], [4], [2]])
    model = converted(net)
    rows = model.draw_logits((x, mask), samples=1)  # with gradients torch takes the slow path
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)
        for _ in range(2):
            assert torch.allclose(model.draw_logits((x, mask), samples=1), rows, atol=1e-5)
        assert torch.allclose(model.draw(component=1)(x, mask), rows[1], atol=1e-5)
        model.set_posterior(mean=1.0, std=0.0)
        assert torch.allclose(model.draw_logits((x, mask), samples=1)[0], net(x, mask), atol=1e-5)


# ------------------------------------------------------------------------------- bytes of tensors, counted by hand

KB = 256  # floats


def test_peak_counts_what_is_alive_at_once() -> None:
    x = torch.zeros(KB)
    with Peak(known=[x]) as peak:
        a = x + 1
        b = a * 2
        del a
        c = b + b  # two are alive again, never three
        del b, c
    assert peak.bytes == 2 * 1024


def test_views_and_known_tensors_are_not_new() -> None:
    x = torch.zeros(KB)
    with Peak(known=[x]) as peak:
        x.view(16, 16).t()
        x.add_(1)
        assert peak.bytes == 0
        made = torch.zeros(KB, dtype=torch.float64)
        made.view(2, -1)
    assert peak.bytes == 2 * 1024


def test_saved_bytes_of_a_linear_layer() -> None:
    layer, x = nn.Linear(64, 32), torch.zeros(8, 64)
    with saved_bytes(known=[*layer.parameters()]) as saved:
        layer(x)
    assert saved.bytes == 4 * 8 * 64  # its input, for the gradient of the weight
    with torch.no_grad(), saved_bytes() as saved:
        layer(x)
    assert saved.bytes == 0
    x = torch.ones(KB, requires_grad=True)
    with saved_bytes(known=[x]) as saved:
        x.exp().square()  # both keep the exponential
    assert saved.bytes == 1024


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA"), True),
        (RuntimeError("MPS backend Out of Memory"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("memory"), False),
    ],
)
def test_errors_that_say_that_memory_ran_out(error: BaseException, memory: bool) -> None:
    assert out_of_memory(error) == memory
