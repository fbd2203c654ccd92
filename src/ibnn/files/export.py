"""Exports a model and its draws as one file that answers without ibnn, in onnxruntime or torch.

The file holds the weights once and, beside them, the z of the K·S draws, (K·S, nodes) numbers drawn before export. Its
graph holds the network once, too: the batch is repeated for every draw, and the rows of a draw share its z. So plain
operators suffice, which every runtime and quantiser knows and which keep all cores busy on a single input; the price is
the memory of K·S·B rows. (A loop over the draws in the graph would need that of B, and a Scan operator.)
"""

import importlib.util
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ibnn import check
from ibnn.errors import complaint
from ibnn.files.answering import Answering, OneNetwork, Pixels, named
from ibnn.files.atomic import write_atomically
from ibnn.inputs import Inputs, as_tensors, batch_length, call_arguments, tensors, tree_map
from ibnn.network import IBNN, no_fast_path
from ibnn.normal import check_seed
from ibnn.novelty.measure import measure
from ibnn.prediction import check_fallback, predict

Format = Literal["onnx", "torch"]
RANKS = 0.01  # difference of p-values that rounding may make, beside that of two ranks
TOLERANCE = 1e-3  # a larger difference to `predict` is not rounding; the usual one is below 1e-5
FACTS = "ibnn"  # name of the metadata in an ONNX file; in torch's it is ibnn.json
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": ()}
_LARGEST = 2**31 - 2**20  # bytes of tensors that fit into an ONNX file of one piece


class Exported(NamedTuple):
    """What was written.

    Attributes:
        path: The file.
        bytes: Its size.
        draw_bytes: Size of the draws in it.
        difference: Largest difference to `predict` on the example, relative to the largest number if that exceeds 1
            (for a Gaussian, to the predictive standard deviation or variance).
    """

    path: Path
    bytes: int
    draw_bytes: int
    difference: float


def export(
    model: IBNN | OneNetwork,
    example: Inputs,
    path: str | os.PathLike[str],
    *,
    samples: int = 5,
    seed: int = 0,
    format: Format = "onnx",
    pixels: Pixels | None = None,
    metadata: Mapping[str, Any] | None = None,
    novelty: bool = True,
    fallback: float | None = None,
) -> Exported:
    """Writes a model as one file that gives the answers of `predict` at the same seed, for any batch size.

    It returns probabilities, total, aleatoric and epistemic (nats); for a Gaussian mean, std, aleatoric and epistemic
    (variances); for several heads "age.mean" and so on. If the model has a reference (see `ibnn.fit_novelty`), the file
    also returns `p_value`, the p-value of every input. Its answers on the example are first compared with `predict`'s.

    Args:
        model: A converted network, or a baseline of one network per component (`Plain`, `Ensemble`).
        example: What one call of the network takes: tensors, the batch first. In ONNX the inputs are called x, or x0,
            x1, … , or by their keys. Only its shapes are written.
        path: Where to; replaced in one step.
        samples: Draws per component, S.
        seed: Decides the draws.
        format: "onnx", or "torch" for `torch.export.load`.
        pixels: Mean and standard deviation of each channel. The file, like the example, then takes images in [0, 1].
        metadata: More facts to keep in the file, such as the names of classes; whatever JSON can hold.
        novelty: Whether the file returns p-values, if the model has a reference.
        fallback: p-value below which answers are mixed with the base rates, as for `predict`.

    Raises:
        ValueError: If the file would not give the answers of `predict`, or cannot be made; nothing is written.

    >>> import ibnn, tempfile
    >>> model = ibnn.convert(ibnn.nets.mlp(4, 3, hidden=8), components=2, seed=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = export(model, torch.ones(1, 4), f"{folder}/model.pt2", format="torch")
    ...     answer = torch.export.load(written.path).module()(torch.ones(6, 4))
    >>> {name: tuple(value.shape) for name, value in answer.items()}
    {'probabilities': (6, 3), 'total': (6,), 'aleatoric': (6,), 'epistemic': (6,)}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(complaint("model", "an IBNN, Plain or Ensemble", type(model).__name__, "Pass a model."))
    example, facts = as_tensors(example, next(model.parameters()).dtype), dict(metadata or {})
    _check_example(example, pixels)
    _check(model, Path(path), samples, seed, format, facts)
    if fallback is not None:
        check_fallback(fallback, getattr(model, "reference", None) if novelty else None)
    answering = Answering(model, samples, seed, pixels, novelty=novelty, fallback=fallback)
    answering.eval().cpu().requires_grad_(False)
    shown = tree_map(lambda t: t.detach().cpu()[torch.arange(3) % batch_length(example)], example)
    answering.find_batch(shown)
    facts |= answering.facts() | {"samples": samples, "seed": seed, "format": format}
    content, difference = _checked(model, answering, shown, facts)
    write_atomically(Path(path), content)
    return Exported(Path(path), len(content), answering.draw_bytes, difference)


def _written(answering: Answering, shown: Inputs, facts: dict[str, Any]) -> tuple[bytes, dict[str, Tensor]]:
    """Returns the content of the file, and what it answers."""
    format = facts["format"]
    try:
        with _quiet():
            program = _traced(answering, shown)
            content = WRITERS[format](program, _names(shown), facts["outputs"], json.dumps(facts))
            return content, READERS[format](content, shown)
    except Exception as error:  # whatever torch, onnxscript or onnxruntime cannot follow
        got = f"one where it stops: {type(error).__name__}: {(str(error).strip() or '–').splitlines()[0]}"
        remedy = "Put what cannot be traced, or depends on values or on the batch size, into plain tensor code."
        expected = f"a network that torch can export to {format} for any batch size"
        raise ValueError(complaint("model", expected, got, remedy)) from error


def _checked(model: Any, answering: Answering, shown: Inputs, facts: dict[str, Any]) -> tuple[bytes, float]:
    """Returns the content of the file, and how far its answers are from those of `predict`; raises if it is far."""
    inputs = answering.normalised(shown)
    expected = predict(model, inputs, samples=facts["samples"], seed=facts["seed"], novelty=False)
    facts["outputs"] = [*named(expected), *(["p_value"] if answering.reference is not None else [])]
    content, found = _written(answering, shown, facts)
    if answering.reference is not None:
        device = next(model.parameters()).device
        p_value = measure(model, tree_map(lambda t: t.to(device), inputs)).p_value.cpu()
        apart = (found["p_value"] - p_value).abs().max().item()
        if not apart <= RANKS + 2 / (answering.reference.ranked + 1):  # rounding may change a rank by one or two
            got, remedy = f"p-values {apart:.2g} apart", "Pass novelty=False, to leave it out."
            raise ValueError(complaint("model", "a network whose novelty can be exported", got, remedy))
        expected = answering.fallen_back(expected, found["p_value"])
    return content, _largest_difference(found, named(expected))


def _largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Returns how far the file's answers are from the expected ones; raises if that is more than rounding."""
    differences = []
    for name, value in expected.items():
        head, dot, kind = name.rpartition(".")
        unit = 1.0  # for entropies; for numbers, their uncertainty
        if (std := expected.get(f"{head}{dot}std")) is not None:
            unit = max(std.max().item(), 1e-4 * expected[f"{head}{dot}mean"].abs().max().item())
            unit = unit if kind in ("mean", "std") else unit**2
        differences.append(((found[name] - value).abs().max() / value.abs().max().clamp_min(unit)).item())
    difference = max(differences)
    if not difference <= TOLERANCE:  # nor NaN
        remedy = "Its layers must see the batch first, and its rows must not depend on each other or on chance."
        wanted = "a network that answers the same for its draws as rows of one batch"
        raise ValueError(complaint("model", wanted, f"answers {difference:.2g} apart", remedy))
    return difference


def _traced(answering: Answering, shown: Inputs) -> torch.export.ExportedProgram:
    """Returns the graph for any batch size, without the example's numbers, paths of source files, and identities."""
    batch = torch.export.Dim("batch")
    blank = tree_map(lambda t: torch.zeros_like(t[:2]), shown)
    with no_fast_path(), torch.no_grad():
        shapes = (tree_map(lambda t: {0: batch}, blank),)  # type: ignore[arg-type, return-value]
        program = torch.export.export(answering, (blank,), dynamic_shapes=shapes, strict=False)
    aten = torch.ops.aten
    for node in list(program.graph.nodes):
        node.meta.pop("stack_trace", None)
        # a multiplication by an identity matrix (see `attention`), which would be as large as a weight
        if node.target is aten.linear.default and len(node.args) == 2 and node.args[1].target is aten.eye.default:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


def _names(x: Inputs) -> list[str]:
    """Returns what the inputs are called in a file."""
    if isinstance(x, Tensor):
        return ["x"]
    return list(x) if isinstance(x, Mapping) else [f"x{number}" for number in range(len(x))]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences what torch's exporters log about themselves."""
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


def _to_onnx(program: torch.export.ExportedProgram, inputs: list[str], outputs: list[str], facts: str) -> bytes:
    given, returned = [f"in.{name}" for name in inputs], [f"out.{name}" for name in outputs]
    made = torch.onnx.export(program, dynamo=True, verbose=False, input_names=given, output_names=returned)
    assert made is not None
    proto = made.model_proto
    graph = proto.graph
    names = dict(zip([*given, *returned], [*inputs, *outputs], strict=True))
    names |= {name: f"inner.{name}" for name in names.values()}  # torch calls values on the way "mean", too
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    for part in (*graph.node, *graph.input, *graph.output, *graph.initializer):
        part.ClearField("metadata_props")  # where in the source it came from: together more than a small network
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
    outputs = [output.name for output in session.get_outputs()]
    feed = dict(zip(_names(x), (t.numpy() for t in tensors(x)), strict=True))
    return dict(zip(outputs, map(torch.from_numpy, session.run(outputs, feed)), strict=True))


def _from_torch(content: bytes, x: Inputs) -> dict[str, Tensor]:
    answers: dict[str, Tensor] = torch.export.load(io.BytesIO(content)).module()(x)
    return answers


WRITERS = {"onnx": _to_onnx, "torch": _to_torch}
READERS = {"onnx": _from_onnx, "torch": _from_torch}  # what a file answers to inputs


def _check(model: IBNN | OneNetwork, path: Path, samples: int, seed: int, format: str, facts: dict[str, Any]) -> None:
    """Raises unless model, format, packages, draws, path and metadata are fit for an export."""
    if not model.latents if isinstance(model, IBNN) else getattr(model, "random", True):
        remedy = "Pass what ibnn.convert returned, or model.component(k) in Plain."
        raise TypeError(complaint("model", "an IBNN, Plain or Ensemble", type(model).__name__, remedy))
    check.choice("format", format, PACKAGES)
    for package in PACKAGES[format]:
        if importlib.util.find_spec(package) is None:
            remedy = "Run: pip install -e '.[export]' in a clone of the repository, or pass format=\"torch\"."
            raise ModuleNotFoundError(complaint(package, "installed, to export to ONNX", "none", remedy), name=package)
    check_seed(seed)
    check.integer("samples", samples, remedy="Pass samples=5.")
    if path.is_dir():
        raise ValueError(complaint("path", "a file", f"the folder {path}", "Add a name, such as model.onnx."))
    try:
        json.dumps(facts)
    except (TypeError, ValueError) as error:
        remedy = "Pass strings, numbers, lists and dicts."
        raise ValueError(complaint("metadata", "what JSON can hold", error, remedy)) from error
    size = sum(t.nbytes for t in (*model.net.parameters(), *model.net.buffers()))
    if format == "onnx" and size + 4 * model.components * samples * getattr(model, "nodes", 0) > _LARGEST:
        raise ValueError(complaint("model", "smaller than 2 GB, for ONNX", f"{size:,} bytes", 'Pass format="torch".'))


def _check_example(example: Inputs, pixels: Pixels | None) -> None:
    """Raises unless every input is a tensor of the batch and, with `pixels`, one of images with as many channels."""
    if isinstance(example, str | os.PathLike):
        remedy = "Pass export(model, example, path), in this order."
        raise TypeError(complaint("example", "what one call of the network takes", f"the path {example}", remedy))
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
