"""DEPLOYMENT: a model and its draws as one file that answers without ibnn, in onnxruntime or torch.

The file holds the weights once and the z of the K·S draws beside them, (K·S, nodes) numbers, drawn before export. Its
graph is the network once, too: the batch is repeated for every draw, and the rows of a draw share its z. So plain
operators suffice, which every runtime and quantiser knows and which keep all cores busy on a single input; the price is
the memory of K·S·B rows. (A loop over the draws in the graph would need that of B, and a Scan operator.)
"""

import copy
import importlib.util
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ibnn._version import __version__
from ibnn.baselines import Ensemble, Plain
from ibnn.errors import complaint
from ibnn.files.atomic import write_atomically
from ibnn.inputs import Inputs, Pick, as_tensors, batch_length, call_arguments, pick, tensors, tree_map
from ibnn.latent import Latent
from ibnn.layers.observe import batch_axes
from ibnn.likelihood import Likelihood
from ibnn.network import IBNN, check_seed, duplicate, no_fast_path
from ibnn.prediction import CategoricalPrediction, GaussianPrediction, JointPrediction, Prediction, predict

Format = Literal["onnx", "torch"]
FACTS = "ibnn"  # name of the metadata in an ONNX file; in torch's it is ibnn.json
TOLERANCE = 1e-3  # a larger difference to `predict` is no rounding; the usual one is below 1e-5
_PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": ()}
_LARGEST = 2**31 - 2**20  # bytes of tensors that fit into an ONNX file of one piece


class Exported(NamedTuple):
    """What was written.

    Attributes:
        path: The file.
        bytes: Its size.
        draw_bytes: That of the draws in it.
        difference: Largest difference to `predict` on the example, relative to the largest number if that exceeds 1 (of
            a Gaussian, the predictive standard deviation or variance).
    """

    path: Path
    bytes: int
    draw_bytes: int
    difference: float


def export(
    model: IBNN | Plain,
    example: Inputs,
    path: str | os.PathLike[str],
    *,
    samples: int = 5,
    seed: int = 0,
    format: Format = "onnx",
    pixels: tuple[Sequence[float], Sequence[float]] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Exported:
    """Writes a model as one file that gives the answers of `predict` at the same seed, for any batch size.

    The file takes what `predict` takes and returns probabilities, total, aleatoric and epistemic (nats); of a Gaussian
    likelihood mean, std, aleatoric and epistemic (variances); of several heads "age.mean" and so on. Its answers on the
    example are compared with those of `predict` before it is put in place.

    Args:
        model: A converted network, or a baseline of one network a component (`Plain`, `Ensemble`).
        example: What one call of the network takes: a tensor, a tuple or a mapping of tensors, the batch first. In ONNX
            the inputs are called x, or x0, x1, … , or by their keys. Only its shapes are written.
        path: Where to; replaced in one step.
        samples: Draws per component, S.
        seed: Decides the draws.
        format: "onnx", or "torch" for `torch.export.load`.
        pixels: Mean and standard deviation of each channel, by which the file then normalises images in [0, 1]; the
            example is of these.
        metadata: More facts to keep in the file, such as the names of classes; whatever JSON can hold.

    Raises:
        ValueError: If the file would not give the answers of `predict`, or cannot be made; nothing is written.

    >>> import tempfile
    >>> from ibnn import convert
    >>> model = convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), components=2, seed=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = export(model, torch.ones(1, 4), f"{folder}/model.pt2", format="torch")
    ...     answer = torch.export.load(written.path).module()(torch.ones(6, 4))
    >>> {name: tuple(value.shape) for name, value in answer.items()}
    {'probabilities': (6, 3), 'total': (6,), 'aleatoric': (6,), 'epistemic': (6,)}
    """
    if isinstance(example, str | os.PathLike):
        remedy = "Pass export(model, example, path), in this order."
        raise TypeError(complaint("example", "what one call of the network takes", f"the path {example}", remedy))
    example, facts = as_tensors(example), dict(metadata or {})
    _check(model, Path(path), samples, seed, format, facts)
    _check_example(example, pixels)
    answering = _Answering(model, samples, seed, pixels).eval().cpu().requires_grad_(False)
    rows = batch_length(example)
    shown = tree_map(lambda t: t.detach().cpu()[torch.arange(3) % rows], example)
    answering.look(shown)
    expected = _named(_asked(model, answering.normalised(shown), samples, seed))
    facts |= answering.facts() | {"samples": samples, "seed": seed, "format": format, "outputs": list(expected)}
    try:
        with _quiet():
            program = _traced(answering, shown)
            content = _WRITERS[format](program, _names(example), list(expected), json.dumps(facts))
            found = _READERS[format](content, shown)
    except Exception as error:  # whatever torch, onnxscript or onnxruntime cannot follow
        reason = f"one where it stops: {type(error).__name__}: {(str(error).strip() or '–').splitlines()[0]}"
        remedy = "Put what cannot be traced, or depends on values or on the batch size, into plain tensor code."
        wanted = f"a network that torch can export to {format} for any batch size"
        raise ValueError(complaint("model", wanted, reason, remedy)) from error
    difference = max(_difference(found[name], expected[name], _unit(name, expected)) for name in expected)
    if not difference <= TOLERANCE:  # nor NaN
        remedy = "Its layers must see the batch first, and its rows must not depend on each other or on chance."
        wanted = "a network that answers the same for its draws as rows of one batch"
        raise ValueError(complaint("model", wanted, f"answers {difference:.2g} apart", remedy))
    write_atomically(Path(path), content)
    return Exported(Path(path), len(content), answering.draw_bytes, difference)


# ------------------------------------------------------------------------------------------------------ what is traced


class _Answering(nn.Module):
    """Inputs to answers: the network on a copy of the batch for each draw, and the likelihood's summary of them."""

    def __init__(
        self, model: IBNN | Plain, samples: int, seed: int, pixels: tuple[Sequence[float], Sequence[float]] | None
    ) -> None:
        super().__init__()
        self.name, self.components, self.pixels = type(model).__name__, model.components, pixels
        self.likelihood: Likelihood = copy.deepcopy(model.likelihood)
        self.logits: Pick | None = getattr(model, "logits", None)
        nets = model.net if isinstance(model.net, nn.ModuleList) else [model.net]  # a list: the members of an ensemble
        self.nets = nn.ModuleList(duplicate(net) for net in nets)
        for parameter in self.nets.parameters():
            parameter.data = parameter.data.contiguous()  # runs keep channels last
        self.copies = self._hold(model.draw_latents(samples, seed).detach()) if isinstance(model, IBNN) else 1
        for name, values in zip(("centre", "spread"), pixels or (), strict=False):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1))

    def _hold(self, z: Tensor) -> int:
        """Gives every latent its part of the draws (J, nodes), in place of its distribution."""
        latents = [module for module in self.nets.modules() if isinstance(module, Latent)]
        for latent, part in zip(latents, z.split([latent.nodes for latent in latents], 1), strict=True):
            dtype = latent.mean.dtype
            del latent.mean, latent.rho, latent.z
            latent.register_buffer("z", part.to(dtype).contiguous())
        return len(z)

    @torch.no_grad()
    def look(self, x: Inputs) -> None:
        """Finds the batch in the layers' inputs; raises where there is none, as when rows are answered together."""
        args, kwargs = call_arguments(tree_map(self._repeated, self.normalised(x)))
        for net in self.nets:
            latents = {name.rpartition(".")[0]: m for name, m in net.named_modules() if isinstance(m, Latent)}
            with no_fast_path(), batch_axes(net, latents, args, kwargs):
                net(*args, **kwargs)

    def forward(self, x: Inputs) -> dict[str, Tensor]:
        args, kwargs = call_arguments(tree_map(self._repeated, self.normalised(x)))
        outputs = (self.likelihood.read(pick(net(*args, **kwargs), self.logits)) for net in self.nets)
        draws = torch.cat(list(outputs))  # (J·B, …), draw by draw
        return _named(self.likelihood.summarise(draws.unflatten(0, (self.components, self._samples, -1))))

    @property
    def _samples(self) -> int:
        return len(self.nets) * self.copies // self.components

    def _repeated(self, x: Tensor) -> Tensor:
        return x.repeat(self.copies, *[1] * (x.dim() - 1)) if self.copies > 1 else x

    def normalised(self, x: Inputs) -> Inputs:
        """What the network was trained on."""
        return x if self.pixels is None else (x - self.centre) / self.spread

    @property
    def draw_bytes(self) -> int:
        """Of the latents' z."""
        return sum(b.numel() * b.element_size() for name, b in self.nets.named_buffers() if name.endswith(".latent.z"))

    def facts(self) -> dict[str, Any]:
        """What the file tells about itself."""
        facts = {"ibnn": __version__, "torch": torch.__version__, "method": self.name, "components": self.components}
        facts |= {"likelihood": type(self.likelihood).__name__, "temperature": self.likelihood.temperature.item()}
        pixels = self.pixels and {"mean": list(self.pixels[0]), "std": list(self.pixels[1])}
        return facts | {"pixels": pixels}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps to itself what torch's exporters say about themselves: deprecations, packages they would know, steps."""
    talkative = ("torch.onnx._internal.exporter._registration", "onnxscript.optimizer._constant_folding")
    levels = {logger: logger.level for logger in map(logging.getLogger, talkative)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _named(answers: Prediction) -> dict[str, Tensor]:
    """The outputs of the file."""
    if isinstance(answers, JointPrediction):
        named = {head: _named(answer) for head, answer in answers.heads.items()}
        return {f"{head}.{name}": value for head, values in named.items() for name, value in values.items()}
    if isinstance(answers, GaussianPrediction):
        return {name: getattr(answers, name) for name in ("mean", "std", "aleatoric", "epistemic")}
    assert isinstance(answers, CategoricalPrediction), "checked"
    return {"probabilities": answers.probs} | {n: getattr(answers, n) for n in ("total", "aleatoric", "epistemic")}


def _asked(model: IBNN | Plain, x: Inputs, samples: int, seed: int) -> Prediction:
    answers = predict(model, x, samples=samples, seed=seed)
    heads = answers.heads.values() if isinstance(answers, JointPrediction) else [answers]
    if not all(isinstance(head, CategoricalPrediction | GaussianPrediction) for head in heads):
        wanted, remedy = "Categorical, Bernoulli or Gaussian, or to answer like them", "Summarise draws as they do."
        raise TypeError(complaint("likelihood", wanted, f"one that answers {type(answers).__name__}", remedy))
    return answers


def _traced(answering: _Answering, shown: Inputs) -> torch.export.ExportedProgram:
    """The graph, for any batch; without the example's numbers, and without the paths of source files."""
    batch = torch.export.Dim("batch")
    blank = tree_map(lambda t: torch.zeros_like(t[:2]), shown)
    with no_fast_path(), torch.no_grad():
        shapes = (tree_map(lambda t: {0: batch}, blank),)  # type: ignore[arg-type, return-value]
        program = torch.export.export(answering, (blank,), dynamic_shapes=shapes, strict=False)
    _drop_identities(program)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def _drop_identities(program: torch.export.ExportedProgram) -> None:
    """Takes out multiplications by an identity matrix (see `attention`), which would be as large as a weight."""
    aten = torch.ops.aten
    for node in list(program.graph.nodes):
        if node.target is aten.linear.default and len(node.args) == 2 and node.args[1].target is aten.eye.default:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


# -------------------------------------------------------------------------------------------------------- the formats


def _to_onnx(program: torch.export.ExportedProgram, inputs: list[str], outputs: list[str], facts: str) -> bytes:
    told, kept = [f"in.{name}" for name in inputs], [f"out.{name}" for name in outputs]
    made = torch.onnx.export(program, dynamo=True, verbose=False, input_names=told, output_names=kept)
    assert made is not None
    proto = made.model_proto
    graph = proto.graph
    names = dict(zip([*told, *kept], [*inputs, *outputs], strict=True))
    names |= {name: f"inner.{name}" for name in names.values()}  # torch calls values on the way "mean", too
    weights = {value.name for value in graph.initializer}
    for number, node in enumerate(graph.node):
        node.ClearField("metadata_props")  # where in the source it came from: together more than a small network
        node.name = f"n{number}"
        for value in node.output:
            if value not in names and value not in weights:
                names[value] = f"v{len(names)}"  # torch's names are as long as the operators
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.ClearField("metadata_props")
        value.name = names.get(value.name, value.name)
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    graph.ClearField("value_info")  # shapes on the way, which runtimes find by themselves
    proto.metadata_props.add(key=FACTS, value=facts)
    content: bytes = proto.SerializeToString()
    return content


def _to_torch(program: torch.export.ExportedProgram, inputs: list[str], outputs: list[str], facts: str) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={f"{FACTS}.json": facts})
    return file.getvalue()


def _from_onnx(content: bytes, x: Inputs) -> dict[str, Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    feed = dict(zip(_names(x), (t.numpy() for t in tensors(x)), strict=True))
    return dict(zip(names, map(torch.from_numpy, session.run(names, feed)), strict=True))


def _from_torch(content: bytes, x: Inputs) -> dict[str, Tensor]:
    answers: dict[str, Tensor] = torch.export.load(io.BytesIO(content)).module()(x)
    return answers


_WRITERS = {"onnx": _to_onnx, "torch": _to_torch}
_READERS = {"onnx": _from_onnx, "torch": _from_torch}


def _names(x: Inputs) -> list[str]:
    """Of the inputs."""
    if isinstance(x, Tensor):
        return ["x"]
    return list(x) if isinstance(x, Mapping) else [f"x{number}" for number in range(len(x))]


def _difference(found: Tensor, expected: Tensor, unit: float) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(unit)).item()


def _unit(name: str, expected: Mapping[str, Tensor]) -> float:
    """What differences are measured by at least: entropies by 1, numbers by their uncertainty, but for rounding."""
    head, _, kind = name.rpartition(".")
    own = {key.removeprefix(f"{head}."): value for key, value in expected.items() if key.rpartition(".")[0] == head}
    if "std" not in own:
        return 1.0
    std = max(own["std"].max().item(), 1e-4 * own["mean"].abs().max().item())
    return std if kind in ("mean", "std") else std**2


# ------------------------------------------------------------------------------------------------------------- checks


def _check(model: IBNN | Plain, path: Path, samples: int, seed: int, format: str, facts: dict[str, Any]) -> None:
    """Raises if it is plain from the arguments that nothing can come of them."""
    if not (isinstance(model, IBNN) and model.latents) and type(model) not in (Plain, Ensemble):
        remedy = "Pass what ibnn.convert returned, or model.component(k) in Plain."
        raise TypeError(complaint("model", "an IBNN, Plain or Ensemble", type(model).__name__, remedy))
    if format not in _PACKAGES:
        raise ValueError(complaint("format", '"onnx" or "torch"', repr(format), "Pass one of the two."))
    for package in _PACKAGES[format]:
        if importlib.util.find_spec(package) is None:
            remedy = 'Run: pip install "ibnn[export]", or pass format="torch".'
            raise ModuleNotFoundError(complaint(package, "installed, to export to ONNX", "none", remedy), name=package)
    check_seed(seed)
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(complaint("samples", "an integer of at least 1", samples, "Pass samples=5."))
    if path.is_dir():
        raise ValueError(complaint("path", "a file", f"the folder {path}", "Add a name, such as model.onnx."))
    try:
        json.dumps(facts)
    except (TypeError, ValueError) as error:
        remedy = "Pass strings, numbers, lists and dicts."
        raise ValueError(complaint("metadata", "what JSON can hold", error, remedy)) from error
    size = sum(t.numel() * t.element_size() for t in (*model.net.parameters(), *model.net.buffers()))
    if format == "onnx" and size + 4 * model.components * samples * getattr(model, "nodes", 0) > _LARGEST:
        raise ValueError(complaint("model", "smaller than 2 GB, for ONNX", f"{size:,} bytes", 'Pass format="torch".'))


def _check_example(example: Inputs, pixels: tuple[Sequence[float], Sequence[float]] | None) -> None:
    """Raises unless every input is a tensor of the batch, and pixels are images of as many channels."""
    rows = batch_length(example)
    args, kwargs = call_arguments(example)
    for part in (*args, *kwargs.values()):
        if not isinstance(part, Tensor) or part.dim() == 0 or len(part) != rows:
            got = f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            remedy = "Wrap the network in a module that fills in what is not of the batch."
            raise ValueError(complaint("example", f"tensors of {rows} rows each", got, remedy))
    if pixels is not None:
        counts = [len(values) for values in pixels]
        if not isinstance(example, Tensor) or example.dim() != 4 or counts != [example.shape[1]] * 2:
            got = f"{counts} for {tuple(example.shape) if isinstance(example, Tensor) else type(example).__name__}"
            remedy = "Pass pixels=(means, stds) for one tensor of images (B, C, H, W), or leave it out."
            raise ValueError(complaint("pixels", "a mean and a deviation of every channel", got, remedy))
