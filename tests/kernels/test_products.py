"""Kernels, against the same networks without: x ∘ z computed first, by autograd."""

import contextlib
import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import ddp_job
import pytest
import torch
from cases import Calls, LowRank, Post, Same, Standardised, Windows
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import ibnn
from ibnn.nets import VGG16, WideResNet

B, K = 4, 3


def bytes_saved(call: Callable[[], Tensor], net: nn.Module) -> int:
    """Bytes of the distinct storages that a call keeps for its backward pass, without the parameters."""
    own = {p.untyped_storage()._cdata for p in net.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # alive, so that no address is used twice
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = call()
    assert output.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@contextlib.contextmanager
def keeping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The slow reference: every layer multiplies its input first, and keeps the product."""
    with monkeypatch.context() as patch:
        patch.setattr("ibnn.kernels.run", lambda *_: None)
        yield


def converted(net: nn.Module, **options: object) -> ibnn.IBNN:
    return ibnn.convert(net, **{"components": K, "init_std": 0.3, "likelihood": "gaussian", "seed": 5, **options})


class InPlace(nn.Linear):
    """Changes its input, which is the product, before using it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.mul_(2.0))


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, groups=2, padding=1, padding_mode="circular"),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(6, 3, 2, stride=2),
        nn.Flatten(),
        nn.Linear(3 * 8 * 8, 3),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (B, 5)),
    "tokens": (mlp, (B, 6, 5)),
    "tokens with a non-contiguous input": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), mlp_of(7)), (B, 2, 3, 5)),
    "convolutions": (convolutional, (B, 2, 4, 4)),
    "layer in a layer": (lambda: nn.Sequential(Post(5, 4), nn.Tanh(), nn.Linear(4, 3)), (B, 5)),
    "product used twice": (lambda: nn.Sequential(LowRank(5, 4), nn.Tanh(), nn.Linear(4, 3)), (B, 5)),
    "product changed in place": (lambda: nn.Sequential(InPlace(5, 4), nn.Tanh(), InPlace(4, 3)), (B, 5)),
    "padded": (lambda: nn.Sequential(Same(2, 3, 3), nn.ReLU(), Standardised(3, 2, 3)), (B, 2, 6)),
    "by keyword": (lambda: Calls("keyword"), (B, 2, 5)),
    "windows": (Windows, (B, 2, 6)),
    "parametrised": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 4)), nn.Linear(4, 3)), (B, 5)),
    "checkpointed": (lambda: Checkpointed(convolutional()), (B, 2, 4, 4)),
    "checkpointed layer in a layer": (lambda: nn.Sequential(Checkpointed(Post(5, 4)), nn.Linear(4, 3)), (B, 5)),
}


def mlp_of(nodes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(nodes, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))


def outcome(model: ibnn.IBNN, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output of one forward pass in train mode, and the gradients of all parameters and of x."""
    model, x = copy.deepcopy(model), x.clone(memory_format=torch.preserve_format).requires_grad_()
    output = model(x)
    output.square().sum().backward()
    return output.detach(), [p.grad for p in (*model.net.parameters(), x)]


def assert_same(model: ibnn.IBNN, x: Tensor, monkeypatch: pytest.MonkeyPatch, **close: float) -> None:
    output, gradients = outcome(model, x)
    with keeping(monkeypatch):
        expected, references = outcome(model, x)
    torch.testing.assert_close(output, expected, **{"rtol": 1e-12, "atol": 1e-12, **close})
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, **{"rtol": 1e-12, "atol": 1e-12, **close})


@pytest.mark.parametrize("name", NETS)
def test_outputs_and_gradients_are_those_of_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = NETS[name]
    x = torch.randn(shape, dtype=torch.float64)
    if "non-contiguous" in name:
        x = x.transpose(1, 2)
    assert_same(converted(make().double()).train(), x, monkeypatch)


@pytest.mark.bf16
def test_channels_last_and_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted(convolutional()).train()
    x = torch.randn(B, 2, 4, 4)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert_same(last, x.contiguous(memory_format=torch.channels_last), monkeypatch, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(model, x, monkeypatch, rtol=0.1, atol=0.1)  # eight bits, and sums of many


@pytest.mark.bf16
def test_under_autocast_no_product_is_kept_either() -> None:
    net, x = VGG16(width=0.125).train(), torch.randn(16, 3, 32, 32)
    model = ibnn.convert(net, components=2, seed=0).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = bytes_saved(lambda: net(x), net)
        model(x)  # the first pass of a model is watched
        ours = bytes_saved(lambda: model(x), model)
    assert ours <= 1.1 * plain  # the draws, at full precision, weigh more beside activations of two bytes


def images() -> nn.Module:
    convolutions = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))


@pytest.mark.parametrize(
    ("make", "shape"),
    [(images, (16, 3, 32, 32)), (lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), mlp_of(64)), (16, 256, 32))],
    ids=["convolutions", "tokens"],
)
@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.bf16), torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "weights"])
def test_in_half_precision_gradients_are_right_and_no_product_is_kept(
    make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype, autocast: bool
) -> None:
    net, x = make(), torch.randn(shape)
    net, x = (net, x) if autocast else (net.to(dtype), x.to(dtype))
    model = converted(net, likelihood="categorical", components=2).train()
    with torch.autocast("cpu", dtype, enabled=autocast):
        plain = bytes_saved(lambda: net(x), net)
        model(x)  # the first pass of a model is watched
        wide = copy.deepcopy(model)
        assert bytes_saved(lambda: copy.deepcopy(model)(x), model) <= 1.03 * plain
        model(x).float().square().sum().backward()
    wide.float()(x.float()).square().sum().backward()
    most = {torch.bfloat16: 0.03, torch.float16: 0.01}[dtype]  # a plain network has half of that
    for found, expected in zip(model.parameters(), wide.parameters(), strict=True):
        if expected.grad is not None:
            assert (found.grad - expected.grad).norm() <= most * expected.grad.norm()


@pytest.mark.parametrize("name", ["mlp", "tokens", "convolutions", "layer in a layer", "product used twice"])
def test_first_and_second_derivatives_are_right(name: str) -> None:
    make, shape = NETS[name]
    model = converted(make().double()).train()
    for module in model.net.modules():
        if isinstance(module, nn.Sequential):
            for place, child in module.named_children():
                if isinstance(child, nn.ReLU):  # kinks have no second derivative
                    setattr(module, place, nn.Tanh())
    z = torch.randn(B, model.nodes, dtype=torch.float64, requires_grad=True)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = next(model.net.parameters())

    def output(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        return model.outputs(x, z[None])[0]

    assert torch.autograd.gradcheck(output, (x, z, weight), fast_mode=True)
    assert torch.autograd.gradgradcheck(output, (x, z, weight), fast_mode=True)


@pytest.mark.parametrize(
    "make",
    [lambda: VGG16(width=0.125), lambda: VGG16(width=0.125, batchnorm=True), lambda: WideResNet(depth=10, width=1)],
    ids=["VGG16", "VGG16 with BatchNorm", "WideResNet-10-1"],
)
def test_a_converted_network_keeps_its_draws_and_no_more_activations(make: Callable[[], nn.Module]) -> None:
    net, x, rows = make().train(), torch.randn(16, 3, 32, 32), 16
    model = ibnn.convert(net, components=2, seed=0).train()
    plain = bytes_saved(lambda: net(x), net)
    for _ in range(2):  # the first pass of a model is watched
        ours = bytes_saved(lambda: model(x), model)
    draws = 2 * rows * model.nodes * 4  # z and the noise behind it
    posterior = 4 * 2 * model.nodes * 4 + 8 * rows  # σ and which component
    assert 0 <= ours - plain <= draws + posterior
    assert ours <= 1.03 * plain or "VGG" in type(net).__name__
    assert ours <= 1.035 * plain


def test_frozen_latents_keep_no_product_either() -> None:
    net, x = mlp(), torch.randn(64, 5)
    model = converted(net).train()
    for latent in model.latents.values():
        latent.requires_grad_(False)
    plain = bytes_saved(lambda: net(x), net)
    assert bytes_saved(lambda: model(x), model) <= plain + 4 * 64 * model.nodes


def test_checkpointed_layers_keep_nothing() -> None:
    body = nn.Sequential(nn.Linear(5, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 3))
    sizes = []
    for net in (Checkpointed(body), body):
        model, x = converted(net).train(), torch.randn(64, 2, 5)
        model(x)
        sizes.append(sum(1 for _ in held(model, x)))
    assert sizes[0] == 0 < sizes[1]


def held(model: ibnn.IBNN, x: Tensor) -> Iterator[Tensor]:
    """The tensors of hidden layers that a forward pass leaves alive."""
    output = model(x)
    gc.collect()
    yield from (t for t in gc.get_objects() if type(t) is Tensor and t.shape == (64, 2, 50))
    del output


def test_other_saved_tensor_hooks_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = converted(mlp().double()).train(), torch.randn(B, 5, dtype=torch.float64)
    with save_on_cpu():
        assert_same_with_hooks(model, x, monkeypatch)


def assert_same_with_hooks(model: ibnn.IBNN, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    for context in (contextlib.nullcontext(), keeping(monkeypatch)):
        with context:
            twin = copy.deepcopy(model)
            twin(x).square().sum().backward()
            outcomes.append([p.grad for p in twin.net.parameters()])
    torch.testing.assert_close(*outcomes)


@pytest.mark.parametrize("what", ["weight", "input", "hidden"])
def test_changes_in_place_before_the_backward_pass_are_noticed(what: str) -> None:
    model, x = converted(mlp()).train(), torch.randn(B, 5)
    hidden: list[Tensor] = []
    model.net[2].register_forward_pre_hook(lambda layer, args: hidden.append(args[0]), prepend=True)
    output = model(x).sum()
    with torch.no_grad():
        {"weight": model.net[2].weight, "input": x, "hidden": hidden[-1]}[what].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_transforms_of_torch_func_keep_the_product() -> None:
    model, x = converted(mlp().double()).eval(), torch.randn(B, 5, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    found = torch.func.grad(loss)(parameters, x)
    loss(dict(model.named_parameters()), x).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad)
    rows = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x[:, None])
    torch.testing.assert_close(rows["net.0.weight"].sum(0), found["net.0.weight"])


@pytest.mark.slow
def test_compiled_networks_leave_it_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ibnn.kernels.run", lambda *_: pytest.fail("a kernel in a compiled network"))
    model, x = converted(mlp().double()).train(), torch.randn(B, 5, dtype=torch.float64)
    twin = copy.deepcopy(model)
    torch.compile(twin, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    with keeping(monkeypatch):
        model(x).square().sum().backward()
    for found, expected in zip(twin.net.parameters(), model.net.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


@pytest.mark.slow
def test_two_workers_of_ddp_get_the_gradients_of_keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, ddp_job.__file__]
    workers = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meeting"), str(tmp_path / "out.pt")]) for rank in (0, 1)
    ]
    assert [worker.wait(120) for worker in workers] == [0, 0]
    parts = []
    for rank in (0, 1):
        model, x = ddp_job.make()
        with keeping(monkeypatch):
            for _ in range(2):
                model.zero_grad()
                model(x.chunk(2)[rank]).square().sum().backward()
        parts.append([p.grad for p in model.net.parameters()])
    for found, *references in zip(torch.load(tmp_path / "out.pt", weights_only=True), *parts, strict=True):
        torch.testing.assert_close(found, sum(references) / 2, rtol=1e-12, atol=1e-12)


def test_copies_and_reverted_networks_have_forwards_of_their_own() -> None:
    model, x = converted(mlp()).train(), torch.randn(B, 5)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.net[0].forward.func.__self__ is twin.net[0].latent
        assert all(latent.current_pass is twin._pass for latent in twin.latents.values())
        assert all(torch.equal(a, b) for a, b in zip(outcome(twin, x)[1], outcome(model, x)[1], strict=True))
    for net in (model.component(0), ibnn.revert(model)):
        assert "forward" not in vars(net[0])
