"""Exported files answer as `predict` does, hold the network once, and need no ibnn."""

import copy
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ibnn
from ibnn.baselines import Ensemble, MeanField, Plain
from ibnn.nets import VGG16, LeNet, WideResNet, mlp
from ibnn.nets.dense import Affine

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

ROOT = Path(__file__).parents[2]
SAMPLES, SEED = 3, 4
NAMES = {"probabilities": "probs", "total": "total", "aleatoric": "aleatoric", "epistemic": "epistemic"}


class Signal(nn.Module):
    """1-d convolutions, plain, grouped and transposed, on a batch of series."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(2, 8, 5, stride=2), nn.BatchNorm1d(8), nn.GELU(), nn.Conv1d(8, 8, 3, groups=4), nn.ReLU()
        )
        self.up, self.head = nn.ConvTranspose1d(8, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.up(self.body(x)).mean(2))
        return scores


class Encoder(nn.Module):
    """A Transformer encoder of Linear layers; takes tokens and a mask by keyword."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.embed, self.heads = nn.Embedding(11, width), heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.head = nn.Linear(width, 4)

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        query, key, value = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).masked_fill(~mask[:, None, None], -1e4)
        x = x + self.out((weights.softmax(-1) @ value).transpose(1, 2).flatten(2))
        x = x + self.inner(self.norms[1](x))
        return {"logits": self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))}


class Recurrent(nn.Module):
    """A GRU on a batch of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.head = nn.GRU(5, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.steps(x)[0].mean(1))
        return scores


class TorchEncoder(nn.Module):
    """torch's own Transformer encoder, time first."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, norm_first=True)
        self.embed, self.head = nn.Linear(5, width), nn.Linear(width, 4)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(self.embed(x).transpose(0, 1)).mean(0))
        return scores


class Block(nn.Module):
    """Attention and an MLP of Linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.inner(self.norms[1](x))


class ViT(nn.Module):
    """A vision Transformer, of the width of ViT-tiny."""

    def __init__(self, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, width, 4, stride=4), nn.LayerNorm(width)
        self.first, self.place = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.randn(1, 65, width) / 50)
        self.blocks, self.head = nn.Sequential(*(Block(width, 3) for _ in range(depth))), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.place
        scores: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return scores


def tokens(rows: int) -> dict[str, Tensor]:
    lengths = torch.arange(rows) % 5 + 2
    return {"tokens": torch.randint(11, (rows, 6)), "mask": torch.arange(6) < lengths[:, None]}


def images(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, *shape)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "mlp": (lambda: mlp(64, 10), images(64)),
    "lenet": (LeNet, images(1, 28, 28)),
    "vgg": (lambda: VGG16(width=0.25, batchnorm=True), images(3, 32, 32)),
    "wideresnet": (lambda: WideResNet(depth=10, width=2), images(3, 32, 32)),
    "conv1d": (Signal, images(2, 20)),
    "transformer": (Encoder, tokens),
    "gru": (Recurrent, images(3, 5)),
    "torch encoder": (TorchEncoder, images(6, 5)),
    "vit": (ViT, images(3, 32, 32)),
    "wideresnet-16-4": (lambda: WideResNet(depth=16, width=4), images(3, 32, 32)),
}
MORE = {"transformer": 2, "vit": 8, "gru": 1}  # multiplications beside the latents' own
LENGTHS = {"transformer", "gru", "torch encoder"}  # take sequences of any length


def quick(*names: str) -> list[Any]:
    """All networks; those not named are slow."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in NETS]


def make(name: str, **options: Any) -> tuple[ibnn.IBNN, Any]:
    """A model whose noise and temperature show, and five inputs."""
    torch.manual_seed(1)
    net, inputs = NETS[name]
    model = ibnn.convert(net(), components=4, seed=0, **options).eval()
    model.set_posterior(std=0.3)
    model.likelihood.temperature.fill_(0.25)  # untrained networks say little
    return model, inputs(5)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ibnn.Exported]:
    folder = tmp_path_factory.mktemp("exported")

    @functools.cache
    def write(name: str, format: Any = "onnx") -> ibnn.Exported:
        model, x = make(name)
        path = folder / f"{name}.{format}"
        return ibnn.export(model, x, path, samples=SAMPLES, seed=SEED, format=format, metadata={"classes": ["a", "b"]})

    return write


def ask(path: Path, x: Any) -> dict[str, Tensor]:
    """By onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # its threads would spin
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = x if isinstance(x, dict) else {"x": x}
    names = [output.name for output in session.get_outputs()]
    found = session.run(names, {name: value.numpy() for name, value in feed.items()})
    return dict(zip(names, map(torch.from_numpy, found), strict=True))


def rows_of(x: Any, rows: slice) -> Any:
    return {name: value[rows] for name, value in x.items()} if isinstance(x, dict) else x[rows]


def operators(path: Path) -> list[str]:
    nodes = list(onnx.load(path).graph.node)
    inner = [attribute.g for node in nodes for attribute in node.attribute if attribute.HasField("g")]  # of a Scan
    return [node.op_type for node in (*nodes, *(node for graph in inner for node in graph.node))]


def check_answers(name: str, answer: Callable[[Any], dict[str, Tensor]]) -> None:
    model, x = make(name)
    parts = [rows_of(x, slice(0, 5)), rows_of(x, slice(2, 3))]  # not those that were traced
    if name in LENGTHS:
        twice = {key: torch.cat([value] * 2, 1) for key, value in x.items()} if isinstance(x, dict) else None
        parts.append(torch.cat([x] * 2, 1) if twice is None else twice)
    for part in parts:
        answers, expected = answer(part), model.predict(part, samples=SAMPLES, seed=SEED)
        assert list(answers) == list(NAMES)
        for output, field in NAMES.items():
            torch.testing.assert_close(answers[output], getattr(expected, field), rtol=1e-5, atol=1e-5)
    assert answers["epistemic"].min() > 1e-4  # or nothing was compared


@pytest.mark.parametrize("name", quick("lenet"))
def test_onnx_answers_as_predict_and_holds_the_network_once(name: str, written: Callable[..., ibnn.Exported]) -> None:
    model, _ = make(name)
    found = written(name)
    assert found.difference < 1e-5
    check_answers(name, functools.partial(ask, found.path))
    once = sum(t.numel() * t.element_size() for t in make_plain(name).state_dict().values())
    units = 6 * 12 * 12 + 16 * 4 * 4 if name == "lenet" else 0  # inputs of its second and third convolution
    draws = 4 * model.components * SAMPLES * (model.nodes + units)
    if name == "lenet" or model.draws == "channel":
        assert found.draw_bytes == draws
    assert found.draw_bytes >= draws
    assert found.bytes == found.path.stat().st_size < once + 1.1 * found.draw_bytes + 20_000  # of operators
    layers = [op for op in operators(found.path) if op.startswith(("Conv", "Gemm", "MatMul"))]
    if name == "torch encoder":  # four projections and two products for each of its two latents on attention
        assert len(layers) == len(model.latents) + 2 * 5
    else:  # attention multiplies twice; the weights of a GRU's state in its Scan
        assert len(layers) == len(model.latents) + MORE.get(name, 0)


def make_plain(name: str) -> nn.Module:
    torch.manual_seed(1)
    return NETS[name][0]().eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "lenet", "vgg", "torch encoder", "vit", "wideresnet-16-4"])
def test_size_against_the_plain_network(name: str, tmp_path: Path) -> None:
    model, x = make(name, draws="channel")
    whole = ibnn.export(model, x, tmp_path / "whole.onnx", samples=10)
    plain = ibnn.export(Plain(make_plain(name)), x, tmp_path / "plain.onnx")
    assert plain.draw_bytes == 0
    assert whole.draw_bytes == 4 * 40 * model.nodes
    assert whole.bytes <= plain.bytes + 1.1 * whole.draw_bytes


@pytest.mark.parametrize("name", quick("lenet", "gru"))
def test_torch_answers_as_predict(name: str, written: Callable[..., ibnn.Exported]) -> None:
    check_answers(name, torch.export.load(written(name, "torch").path).module())


def test_a_single_draw(tmp_path: Path) -> None:
    model = ibnn.convert(mlp(4, 2, hidden=4), components=1, seed=0)
    ibnn.export(model, torch.randn(1, 4), tmp_path / "a.pt2", samples=1, format="torch")
    loaded = torch.export.load(tmp_path / "a.pt2").module()
    for rows in (1, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(loaded(x)["probabilities"], model.predict(x, samples=1).probs)
        assert loaded(x)["epistemic"].abs().max() < 1e-6


@pytest.mark.slow
def test_no_ibnn_is_needed(written: Callable[..., ibnn.Exported], tmp_path: Path) -> None:
    model, x = make("lenet")
    np.save(tmp_path / "x.npy", x.numpy())
    paths = [str(written("lenet", format).path) for format in ("onnx", "torch")]
    code = (
        "import sys; sys.modules['ibnn'] = None\n"
        "import json, numpy, onnxruntime, torch\n"
        "folder, onnx, pt2 = sys.argv[1:]; x = numpy.load(folder + '/x.npy')\n"
        "options = onnxruntime.SessionOptions(); options.intra_op_num_threads = 1; torch.set_num_threads(1)\n"
        "session = onnxruntime.InferenceSession(onnx, options, providers=['CPUExecutionProvider'])\n"
        "numpy.save(folder + '/onnx.npy', session.run(['probabilities'], {'x': x})[0])\n"
        "facts = {'ibnn.json': ''}; program = torch.export.load(pt2, extra_files=facts)\n"
        "numpy.save(folder + '/torch.npy', program.module()(torch.from_numpy(x))['probabilities'])\n"
        "print(json.dumps([session.get_modelmeta().custom_metadata_map['ibnn'], facts['ibnn.json']]))\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path), *paths]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    expected = model.predict(x, samples=SAMPLES, seed=SEED).probs
    for format in ("onnx", "torch"):
        found = torch.from_numpy(np.load(tmp_path / f"{format}.npy"))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for format, text in zip(("onnx", "torch"), json.loads(done.stdout.splitlines()[-1]), strict=True):
        facts = json.loads(text)
        assert facts.pop("temperature") == pytest.approx(0.25)
        assert facts == {
            "classes": ["a", "b"],
            "ibnn": ibnn.__version__,
            "torch": torch.__version__,
            "method": "IBNN",
            "components": 4,
            "likelihood": "Categorical",
            "pixels": None,
            "samples": SAMPLES,
            "seed": SEED,
            "format": format,
            "any_length": False,
            "outputs": list(NAMES),
        }


@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_files_tell_nothing_of_the_machine(format: str, written: Callable[..., ibnn.Exported]) -> None:
    content = written("lenet", format).path.read_bytes()
    for words in (str(ROOT), str(Path(torch.__file__).parents[1]), "ibnn::"):
        assert words.encode() not in content


@pytest.mark.slow
def test_gaussian_and_bernoulli(tmp_path: Path) -> None:
    for likelihood in (ibnn.Gaussian(noise="predicted"), ibnn.Gaussian(init_std=0.3), ibnn.Bernoulli()):
        model = ibnn.convert(mlp(3, 4, hidden=8), likelihood=likelihood, components=3, seed=0)
        likelihood.temperature.fill_(0.7)
        x = torch.randn(6, 3)
        ibnn.export(model, x, tmp_path / "a.onnx", samples=2)
        answers, expected = ask(tmp_path / "a.onnx", x), model.predict(x, samples=2)
        gaussian = isinstance(expected, ibnn.GaussianPrediction)
        names = {n: n for n in ("mean", "std", "aleatoric", "epistemic")} if gaussian else NAMES
        assert list(answers) == list(names)
        for output, field in names.items():
            torch.testing.assert_close(answers[output], getattr(expected, field), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_numbers_in_units_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As runs of points have them: a wrong answer is noticed however small its unit."""
    for scale, centre in ((1e-2, 1000.0), (1e-6, 0.0)):
        net = nn.Sequential(Affine(torch.tensor([10.0, 1e-3]), 0.0), mlp(2, 1, hidden=8), Affine(scale, centre))
        x = torch.randn(6, 2) * torch.tensor([0.1, 1e3])
        model = ibnn.convert(net, likelihood=ibnn.Gaussian(init_std=scale), components=3, seed=0)
        if not centre:
            model = Ensemble([net, copy.deepcopy(net)], likelihood=ibnn.Gaussian(init_std=scale))
        ibnn.export(model, x, tmp_path / "a", samples=2, format="torch")
        answers, expected = torch.export.load(tmp_path / "a").module()(x), model.predict(x, samples=2)
        rounding = 1e-4 * scale + 1e-6 * centre
        for name in ("mean", "std"):
            torch.testing.assert_close(answers[name], getattr(expected, name), rtol=1e-4, atol=rounding)

    class Wrong:
        def module(self) -> Callable[[Tensor], dict[str, Tensor]]:
            return lambda x: {n: getattr(model.predict(x), n) + 0.5 * scale * (n == "mean") for n in answers}

    monkeypatch.setattr(torch.export, "load", lambda *_, **__: Wrong())
    with pytest.raises(ValueError, match="apart"):
        ibnn.export(model, x, tmp_path / "a", samples=2, format="torch")


def test_baselines_of_one_network_a_component(tmp_path: Path) -> None:
    x = torch.randn(4, 3)
    for method in (Plain(mlp(3, 2, hidden=8)), Ensemble([mlp(3, 2, hidden=8) for _ in range(2)])):
        ibnn.export(method, x, tmp_path / "a.pt2", format="torch")
        answers = torch.export.load(tmp_path / "a.pt2").module()(x)
        torch.testing.assert_close(answers["probabilities"], method.predict(x).probs)


def test_pixels_are_normalised_in_the_file(tmp_path: Path) -> None:
    model = ibnn.convert(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3)), components=2, seed=0)
    pixels = torch.rand(4, 1, 6, 6)
    ibnn.export(model, pixels, tmp_path / "a.pt2", samples=1, pixels=((0.4,), (0.2,)), format="torch")
    expected = model.predict((pixels - 0.4) / 0.2, samples=1).probs
    answers = torch.export.load(tmp_path / "a.pt2").module()(pixels)
    torch.testing.assert_close(answers["probabilities"], expected, rtol=0, atol=1e-5)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.step(x.transpose(0, 1)).mean(0))
        return scores


@pytest.mark.parametrize("steps", [pytest.param(6, marks=pytest.mark.slow), 10])  # 10: as many as draws
def test_layers_that_see_time_first(steps: int, tmp_path: Path) -> None:
    model, x = ibnn.convert(TimeFirst(), components=2, seed=0), torch.randn(4, steps, 4)
    ibnn.export(model, x, tmp_path / "a.pt2", format="torch")
    answers = torch.export.load(tmp_path / "a.pt2").module()(x)
    torch.testing.assert_close(answers["probabilities"], model.predict(x).probs)


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = ibnn.convert(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), components=2, seed=0)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ibnn.export(model, torch.randn(5, 3), tmp_path / "a.pt2", format="torch")
    assert model.training
    assert model.net[1].training
    assert all(p.requires_grad for p in model.parameters())
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


# ------------------------------------------------------------------------------------------------------------- refusals


class Unbatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.make = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = x @ self.make(self.table)
        return scores


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        return scores - scores.mean(0)


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class TwoScales(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        large = super().forward(x)
        small: Tensor = super().forward(nn.functional.avg_pool2d(x, 2))
        return large.mean((2, 3)) + small.mean((2, 3))


def centred() -> ibnn.IBNN:
    model = ibnn.convert(Centred(4, 2), components=2, seed=0)
    model.set_posterior(std=0.5)
    return model


def small() -> ibnn.IBNN:
    return ibnn.convert(mlp(4, 2, hidden=4), components=2, seed=0)


@pytest.mark.parametrize(
    ("model", "example", "options", "words"),
    [
        (lambda: mlp(4, 2), torch.ones(2, 4), {}, "`model` to be an IBNN, Plain or Ensemble, but got Sequential"),
        (lambda: MeanField(mlp(4, 2)), torch.ones(2, 4), {}, "but got MeanField"),
        (small, torch.ones(2, 4), {"format": "tflite"}, "`format`"),
        (small, torch.ones(2, 4), {"samples": 0}, "`samples`"),
        (small, torch.ones(2, 4), {"seed": -1}, "`seed`"),
        (small, torch.ones(0, 4), {}, "at least one row"),
        (
            small,
            "model.onnx",
            {"path": torch.ones(2, 4)},
            "but got the path model.onnx. Pass export(model, example, path)",
        ),
        (small, (torch.ones(2, 4), torch.ones(3)), {}, "tensors of 2 rows each, but got shape (3,)"),
        (small, (torch.ones(2, 4), True), {}, "but got bool"),
        (small, torch.ones(2, 4), {"pixels": ((0.5,), (0.5,))}, "`pixels`"),
        (small, torch.ones(2, 4), {"metadata": {"a": object()}}, "`metadata`"),
        (small, torch.ones(2, 4), {"metadata": 3}, "`metadata`"),
        (small, torch.ones(2, 4), {"pixels": 3}, "`pixels`"),
        (small, torch.ones(2, 4), {"path": "."}, "a file, but got the folder"),
        (small, torch.ones(2, 4), {"path": 3}, "`path`"),
        (object, torch.ones(2, 4), {}, "`model`"),
        (small, torch.ones(2, 3), {}, "`x`"),
        (
            lambda: ibnn.convert(Unbatched(), components=2),
            torch.randn(2, 3),
            {},
            "of a dimension that is the batch",
        ),
        (
            centred,
            torch.randn(2, 4),
            {},
            "for its draws as rows of one batch",
        ),
        (lambda: ibnn.convert(TwoScales(nn.Conv2d(6, 3, 3))), torch.rand(2, 6, 8, 8), {}, 'draws="channel"'),
        (lambda: ibnn.convert(Branching(4, 2), components=2), torch.ones(2, 4), {}, "that torch can export to torch"),
    ],
)
def test_refusals(
    model: Callable[[], Any],
    example: Any,
    options: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"path": "new/model.pt2", "format": "torch", **options}
    with pytest.raises((ValueError, TypeError)) as caught:
        ibnn.export(model(), example, **options)
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_onnx_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="export"):
        ibnn.export(small(), torch.ones(2, 4), tmp_path / "a.onnx")


def test_an_older_file_survives_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.pt2").write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        ibnn.export(small(), torch.ones(2, 4), tmp_path / "a.pt2", format="torch")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt2"]
    assert (tmp_path / "a.pt2").read_text() == "old"
