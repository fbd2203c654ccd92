import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ibnn
from ibnn.nets import VGG16, CifarResNet, LeNet, ResNet, WideResNet, input_shape, make, mlp, names

Layout = dict[str, tuple[int, ...]]


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


# --- torchvision's layouts, written down ----------------------------------------------------------


def affine(name: str, *shape: int) -> Layout:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def norm(name: str, channels: int) -> Layout:
    statistics = {f"{name}.{key}": (channels,) for key in ("running_mean", "running_var")}
    return affine(name, channels) | statistics | {f"{name}.num_batches_tracked": ()}


def resnet_layout(depth: int) -> Layout:
    blocks, bottleneck = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}[depth], depth == 50
    layout, before = {"conv1.weight": (64, 3, 7, 7)} | norm("bn1", 64), 64
    for stage, (width, count) in enumerate(zip((64, 128, 256, 512), blocks, strict=True), start=1):
        out = 4 * width if bottleneck else width
        for block in range(count):
            kernels = [(width, before, 1), (width, width, 3), (out, width, 1)]
            kernels = kernels if bottleneck else [(width, before, 3), (width, width, 3)]
            at = f"layer{stage}.{block}"
            for i, (o, c, k) in enumerate(kernels, start=1):
                layout |= {f"{at}.conv{i}.weight": (o, c, k, k)} | norm(f"{at}.bn{i}", o)
            if before != out:
                layout |= {f"{at}.downsample.0.weight": (out, before, 1, 1)} | norm(f"{at}.downsample.1", out)
            before = out
    return layout | affine("fc", 1000, before)


@pytest.mark.parametrize(
    ("name", "options", "layout", "keys", "weights"),
    [
        ("resnet18", {}, resnet_layout(18), 122, 11_689_512),
        ("resnet50", {}, resnet_layout(50), 320, 25_557_032),
    ],
    ids=["resnet18", "resnet50"],
)
def test_names_and_shapes_are_torchvision_s(
    name: str, options: dict[str, bool], layout: Layout, keys: int, weights: int
) -> None:
    net = on_meta(lambda: make(name, 1000, **options))
    assert [(key, tuple(value.shape)) for key, value in net.state_dict().items()] == list(layout.items())
    assert len(net.state_dict()) == keys
    assert sum(p.numel() for p in net.parameters()) == weights


def test_a_checkpoint_in_torchvision_s_layout_loads_strictly(tmp_path: Path) -> None:
    made = {key: torch.rand(shape) for key, shape in resnet_layout(18).items()}
    made |= {key: torch.tensor(7) for key in made if key.endswith("num_batches_tracked")}
    save_file(made, tmp_path / "resnet18.safetensors")
    net = on_meta(ResNet)
    net.load_state_dict(load_file(tmp_path / "resnet18.safetensors"), strict=True, assign=True)
    assert all(torch.equal(value, made[key]) for key, value in net.state_dict().items())
    del made["layer1.0.bn1.running_var"]
    with pytest.raises(RuntimeError, match=r"Missing key.*layer1\.0\.bn1\.running_var"):
        net.load_state_dict(made, strict=True)


# --- initialisation -------------------------------------------------------------------------------


def test_a_seed_gives_torchvision_s_resnet18() -> None:
    """As torchvision: all layers drawn as torch does, then the convolutions again, He's normal over their outputs."""
    torch.manual_seed(3)
    net = ResNet()
    torch.manual_seed(3)
    convolutions = {key: shape for key, shape in resnet_layout(18).items() if len(shape) == 4}
    for shape in convolutions.values():
        torch.empty(shape).uniform_()
    fc = nn.Linear(512, 1000)
    for key, (out, _, k, _) in convolutions.items():
        expected = torch.empty(convolutions[key]).normal_(0, math.sqrt(2 / (out * k * k)))
        torch.testing.assert_close(net.get_parameter(key).detach(), expected)
    assert torch.equal(net.fc.weight, fc.weight)
    assert torch.equal(net.fc.bias, fc.bias)
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(bool((m.weight == 1).all() and (m.bias == 0).all()) for m in norms)


@pytest.mark.parametrize(
    ("build", "keys", "magnitude"),
    [
        (lambda: mlp(784, 10), 6, 5_725.15174),
        (LeNet, 10, 1_467.501485),
        (lambda: VGG16(width=0.25), 32, 33_996.46247),
        (lambda: WideResNet(depth=10, width=2), 57, 6_827.028809),
        (CifarResNet, 128, 15_455.96415),
        (lambda: CifarResNet(100, depth=32), 200, 26_520.13225),
    ],
    ids=["mlp", "lenet", "vgg16", "wideresnet", "resnet20", "resnet32"],
)
def test_seeds_go_on_giving_the_nets_they_gave(build: Callable[[], nn.Module], keys: int, magnitude: float) -> None:
    """Measured when the first result files were made; another order of drawing moves the sum by about one in 1,000."""
    net = build()
    assert len(net.state_dict()) == keys
    assert sum(p.detach().double().abs().sum().item() for p in net.parameters()) == pytest.approx(magnitude, rel=1e-6)


# --- function -------------------------------------------------------------------------------------


def randomised(net: nn.Module) -> nn.Module:
    """In evaluation, with statistics and scales that are not those of a fresh BatchNorm."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.running_var, module.weight.data, module.bias.data):
                assert tensor is not None
                tensor.uniform_(0.5, 1.0)
    return net.eval()


def slow_resnet(state: dict[str, Tensor], x: Tensor, depth: int) -> Tensor:
    """He et al. from the state alone; the stride is on the first 3 × 3 convolution of a stage, and on its shortcut."""

    def normed(x: Tensor, conv: str, bn: str, stride: int) -> Tensor:
        weight = state[f"{conv}.weight"]
        y = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        mean, var, scale, shift = (
            state[f"{bn}.{key}"][:, None, None] for key in ("running_mean", "running_var", "weight", "bias")
        )
        return (y - mean) / (var + 1e-5).sqrt() * scale + shift

    x = F.max_pool2d(normed(x, "conv1", "bn1", 2).relu(), 3, stride=2, padding=1)
    for stage, count in enumerate((2, 2, 2, 2) if depth == 18 else (3, 4, 6, 3), start=1):
        for block in range(count):
            at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            strides = (1, stride, 1) if depth == 50 else (stride, 1)
            y = x
            for i, s in enumerate(strides, start=1):
                y = normed(y, f"{at}.conv{i}", f"{at}.bn{i}", s)
                y = y.relu() if i < len(strides) else y
            if f"{at}.downsample.0.weight" in state:
                x = normed(x, f"{at}.downsample.0", f"{at}.downsample.1", stride)
            x = (x + y).relu()
    return F.linear(x.mean((2, 3)), state["fc.weight"], state["fc.bias"])


@pytest.mark.parametrize("depth", [18, 50])
def test_resnets_are_the_slow_reference(depth: int) -> None:
    net, x = randomised(ResNet(3, depth=depth)), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(net(x), slow_resnet(net.state_dict(), x, depth), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", names())
def test_every_net_takes_its_input_shape(name: str) -> None:
    net = on_meta(lambda: make(name, 7))
    assert net(torch.empty(2, *input_shape(name), device="meta")).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {"inputs": 5, "hidden": 8, "layers": 3}),
        ("lenet", {"width": 2}),
        ("vgg16-small", {"width": 0.125}),
        ("wideresnet", {"depth": 10, "width": 1}),
        ("resnet20", {}),
    ],
)
def test_small_nets_run_and_rows_do_not_meet(name: str, options: dict[str, float]) -> None:
    net, x = randomised(make(name, 4, **options)), torch.randn(3, *input_shape(name, **options))
    assert net(x).shape == (3, 4)
    torch.testing.assert_close(net(x)[1:2], net(x[1:2]), rtol=1e-4, atol=1e-4)


def test_lenet_width_multiplies_hidden_layers() -> None:
    assert ibnn.plan(LeNet(width=2)).nodes == 413


def test_mlp_layers() -> None:
    assert [layer.nodes for layer in ibnn.plan(mlp(3, 2, hidden=5, layers=2)).layers] == [3, 5, 5]


def test_cifar_resnet_has_the_size_and_names_of_the_public_checkpoints() -> None:
    net = CifarResNet(depth=20)
    assert ibnn.plan(net).weights == 272_474
    assert {"layer1.0.conv1.weight", "layer2.0.downsample.0.weight", "layer3.2.bn2.running_var", "fc.bias"} <= set(
        net.state_dict()
    )


def test_a_converted_resnet18_keeps_names_and_function_at_z_1() -> None:
    net, x = randomised(ResNet(5)), torch.randn(2, 3, 64, 64)
    model = ibnn.convert(net, components=2, seed=0).eval()
    state = model.net.state_dict()
    assert [key for key in state if ".latent." not in key] == list(net.state_dict())
    assert all(torch.equal(state[key], value) for key, value in net.state_dict().items())
    with torch.no_grad():
        assert not torch.allclose(model.draw_logits(x), net(x))
        model.set_posterior(mean=1.0, std=0.0)
        assert all(torch.equal(logits, net(x)) for logits in model.draw_logits(x, samples=1))
    assert list(ibnn.revert(model).state_dict()) == list(net.state_dict())


# --- registry -------------------------------------------------------------------------------------


def test_names_are_those_of_the_contract() -> None:
    expected = "mlp lenet vgg16-small resnet18 resnet50 wideresnet resnet20"
    assert names() == tuple(expected.split())


def test_options_reach_the_net() -> None:
    assert [layer.nodes for layer in ibnn.plan(make("mlp", 2, inputs=3, hidden=5, layers=1)).layers] == [3, 5]
    assert ibnn.plan(make("lenet", width=2)).nodes == 413
    assert ibnn.plan(on_meta(lambda: make("wideresnet", depth=10, width=2))).weights == sum(
        p.numel() for p in WideResNet(depth=10, width=2).parameters()
    )
    for name in ("vgg16-small",):
        for options, expected in (({}, 0.5), ({"dropout": 0.1}, 0.1)):
            net = on_meta(lambda name=name, options=options: make(name, **options))
            assert [m.p for m in net.modules() if isinstance(m, nn.Dropout)] == [expected] * 2
    assert input_shape("mlp") == (784,)
    assert input_shape("lenet", width=3) == (1, 28, 28)


@pytest.mark.parametrize("function", [make, input_shape])
@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("resnet-18", {}, ["`name`", "one of mlp, lenet", "'resnet-18'", "Did you mean 'resnet18'?"]),
        ("vgg16-smal", {}, ["`name`", "'vgg16-smal'", "Did you mean 'vgg16-small'?"]),
        ("wideresnet", {"widht": 2}, ["`options`", "depth, width", "'widht'", "mean 'width'?"]),
        ("resnet18", {"depth": 50}, ["`options`", "none for 'resnet18'", "'depth'", "Leave it out."]),
    ],
)
def test_unknown_names_and_options_are_refused(
    function: Callable[..., object], name: str, options: dict[str, int], parts: list[str]
) -> None:
    with pytest.raises(ValueError, match="Expected") as caught:
        function(name, **options)
    assert all(part in str(caught.value) for part in parts)


def test_an_unknown_depth_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`depth` to be one of 18, 50, but got 20\. .*CifarResNet"):
        ResNet(depth=20)
