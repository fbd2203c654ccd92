"""Exports a model and its draws as one file that answers without ibnn, in onnxruntime or torch; reads ONNX files back.

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
from torch.utils._pytree import tree_map as map_trees

from ibnn import check
from ibnn.errors import complaint
from ibnn.files.answering import Answering, Pixels, named
from ibnn.files.atomic import write_atomically
from ibnn.files.sealed import extra
from ibnn.inputs import Inputs, as_tensors, batch_length, call_arguments, tensors, tree_map
from ibnn.layers.explain import explaining_shapes
from ibnn.likelihood import LIKELIHOODS, Likelihood
from ibnn.network import IBNN, no_fast_path
from ibnn.novelty.measure import measure
from ibnn.prediction import BernoulliPrediction, CategoricalPrediction, GaussianPrediction, JointPrediction, Prediction
from ibnn.prediction.predict import check_fallback, predict

Format = Literal["onnx", "torch"]
RANKS = 0.01  # difference of p-values that rounding may make, beside that of two ranks
TOLERANCE = 1e-3  # a larger difference to `predict` is not rounding; the usual one is below 1e-5
FACTS = "ibnn"  # name of the metadata in an ONNX file; in torch's it is ibnn.json
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": ()}


class Exported(NamedTuple):
    """What was written."""

    path: Path  #: The file.
    bytes: int  #: Its size.
    draw_bytes: int  #: Size of the draws in it.
    #: Largest difference to `predict` on the example, relative to the largest number if that exceeds 1 (for a Gaussian,
    #: to the predictive standard deviation or variance).
    difference: float


def export(
    model: nn.Module,
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

    It takes sequences, (B, L) or (B, L, …), of any length, if the network does; a warning says where torch cannot.
    It returns probabilities, total, aleatoric and epistemic (nats); for a Gaussian mean, std, aleatoric and epistemic
    (variances); for several heads "age.mean" and so on. If the model has a reference (see `ibnn.fit_novelty`), the file
    also returns `p_value`, the p-value of every input. Its answers are first compared with `predict`'s, for
    sequences at two lengths.

    Args:
        model: A converted network, a network without draws (`Plain`, `OnePass`), or an `Ensemble` of these.
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
    _check(model, samples, seed, format, metadata)
    example, facts = as_tensors(example, next(model.parameters()).dtype), dict(metadata or {})
    _check_example(example, pixels)
    path = check.path("path", path)
    if fallback is not None:
        check_fallback(fallback, getattr(model, "reference", None) if novelty else None)
    answering = Answering(model, samples, seed, pixels, novelty=novelty, fallback=fallback)
    answering.eval().cpu().requires_grad_(False)
    shown = tree_map(lambda t: t.detach().cpu()[torch.arange(3) % batch_length(example)], example)
    net: Any = model.net
    with explaining_shapes(net, example):
        answering.find_batch(shown)
    facts |= answering.facts() | {"samples": samples, "seed": seed, "format": format}
    other = _other_length(answering, shown)
    try:
        content, difference = _written(model, answering, [shown] if other is None else [shown, other], facts)
    except ValueError as error:
        if other is None:
            raise
        content, difference = _written(model, answering, [shown], facts)
        message = f"The file takes inputs of the example's length only, because torch cannot follow others. {error}"
        warnings.warn(message, stacklevel=2)
    write_atomically(path, content)
    return Exported(path, len(content), sum(part.draw_bytes for part in answering.parts), difference)


def _other_length(answering: Answering, shown: Inputs) -> Inputs | None:
    """Returns the inputs with another length, the second axis of (B, L) and (B, L, …); None if the network takes one.

    Tensors whose second axis is as long, such as a mask, change with them.
    """
    length = next((t.shape[1] for t in tensors(shown) if t.dim() in (2, 3)), 1)
    if length == 1:
        return None
    kept = torch.arange(length - 1) if length > 2 else torch.tensor([0, 1, 1])
    other = tree_map(lambda t: t.index_select(1, kept) if t.shape[1:2] == (length,) else t, shown)
    try:
        with torch.no_grad():
            answering(other)
    except Exception:  # a layer that takes so many features, or whose units have factors
        return None
    return other


def _written(model: Any, answering: Answering, examples: list[Inputs], facts: dict[str, Any]) -> tuple[bytes, float]:
    """Returns the content of the file, and how far its answers are from those of `predict`; raises if it is far.

    The file takes inputs of any length if there are examples of two.
    """
    samples, seed = facts["samples"], facts["seed"]
    expected = [predict(model, answering.normalised(x), samples=samples, seed=seed, novelty=False) for x in examples]
    outputs = [*named(expected[0]), *(["p_value"] if answering.reference is not None else [])]
    facts |= {"any_length": len(examples) > 1, "outputs": outputs}
    format = facts["format"]
    try:
        with _quiet():
            program, about = _traced(answering, examples), json.dumps(facts)
            if format == "onnx":
                content = _to_onnx(program, _names(examples[0]), outputs, about)
            else:
                torch.export.save(program, written := io.BytesIO(), extra_files={f"{FACTS}.json": about})
                content = written.getvalue()
            found = [file_answers(format, content, x) for x in examples]
    except Exception as error:  # whatever torch, onnxscript or onnxruntime cannot follow
        got = f"one where it stops: {type(error).__name__}: {(str(error).strip() or '–').splitlines()[0]}"
        remedy = "Put what cannot be traced, or depends on values or on the batch size, into plain tensor code."
        wanted = f"a network that torch can export to {format} for any batch size"
        raise ValueError(complaint("model", wanted, got, remedy)) from error
    differences, device = [], next(model.parameters()).device
    for x, answer, file in zip(examples, expected, found, strict=True):
        if answering.reference is not None:
            p_value = measure(model, tree_map(lambda t: t.to(device), answering.normalised(x))).p_value.cpu()
            apart = (file["p_value"] - p_value).abs().max().item()
            if not apart <= RANKS + 2 / (answering.reference.ranked + 1):  # rounding may change a rank by one or two
                got, remedy = f"p-values {apart:.2g} apart", "Pass novelty=False, to leave it out."
                raise ValueError(complaint("model", "a network whose novelty can be exported", got, remedy))
            answer = answering.fallen_back(answer, file["p_value"])
        differences.append(_largest_difference(file, named(answer)))
    return content, max(differences)


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


def _traced(answering: Answering, examples: list[Inputs]) -> torch.export.ExportedProgram:
    """Returns the graph for any batch size, and any length if there are examples of two.

    It is without the example's numbers, paths of source files, and identities.
    """
    blank, batch = tree_map(lambda t: torch.zeros_like(t[:2]), examples[0]), torch.export.Dim("batch")

    def axes(tensor: Tensor, other: Tensor) -> dict[int, Any]:
        sizes = enumerate(zip(tensor.shape, other.shape, strict=True))
        return {0: batch} | {n: torch.export.Dim.DYNAMIC for n, (a, b) in sizes if a != b}

    with no_fast_path(), torch.no_grad():
        shapes = (map_trees(axes, examples[0], examples[-1]),)
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
    """Silences what torch's exporters warn of and log about themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _to_onnx(program: torch.export.ExportedProgram, inputs: list[str], outputs: list[str], facts: str) -> bytes:
    from onnx_ir.passes import common

    made: Any = torch.onnx.export(program, dynamo=True, verbose=False, input_names=inputs, output_names=outputs)
    common.NameFixPass()(made.model)  # torch has a "mean" inside, too
    common.ClearMetadataAndDocStringPass()(made.model)  # says where in the source nodes came from
    proto = made.model_proto
    proto.graph.ClearField("value_info")
    for value in (*proto.graph.input, *proto.graph.output):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param:  # torch's own name
                dim.dim_param = "length" if axis else "batch"
    proto.metadata_props.add(key=FACTS, value=facts)
    content: bytes = proto.SerializeToString()
    return content


def onnx_session(content: bytes | str) -> Any:
    """Returns an onnxruntime session on the CPU for a file's content or path."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run_onnx(session: Any, x: Inputs) -> dict[str, Tensor]:
    """Returns what a file answers to inputs, by name."""
    outputs = [output.name for output in session.get_outputs()]
    feed = dict(zip(_names(x), (t.numpy() for t in tensors(x)), strict=True))
    return dict(zip(outputs, map(torch.from_numpy, session.run(outputs, feed)), strict=True))


class ExportedFile:
    """An ONNX file that `ibnn.export` wrote: it answers, and says what the predictor needs to know."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Reads the file; raises ValueError if it is no file of `ibnn.export`."""
        extra("onnxruntime")
        try:
            self.session = onnx_session(os.fspath(path))
            self.facts: dict[str, Any] = json.loads(self.session.get_modelmeta().custom_metadata_map[FACTS])
        except Exception as error:  # whatever onnxruntime finds wrong with it
            got = f"{path} ({type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else '–'})"
            raise ValueError(complaint("MODEL", "an .onnx file that ibnn.export wrote", got, "Export it.")) from error
        inputs, novelty = self.session.get_inputs(), self.facts.get("p_value") or {}
        self.shapes = {each.name: list(each.shape[1:]) for each in inputs}  # axes of any length are names
        self.whole = "int" in inputs[0].type  # takes integers
        self.components: int = self.facts["components"]
        self.ranked: int | None = novelty.get("held_out")  # held-out inputs that p-values are ranks among
        self.fallback: float | None = novelty.get("fallback")  # p-value below which answers are mixed with base rates
        name = self.facts["likelihood"].removeprefix("OnePass")
        self.likelihood: Likelihood | None = next((c() for c in LIKELIHOODS.values() if c.__name__ == name), None)

    def predict(self, x: Inputs) -> Prediction:
        """Returns the answers for a batch. Intervals of a regression are those of one Gaussian."""
        return self._prediction(run_onnx(self.session, x))

    def _prediction(self, found: dict[str, Tensor]) -> Prediction:
        novelty: dict[str, Any] = {"p_value": found.pop("p_value", None), "ranked": self.ranked or 0}
        if "aleatoric" not in found:  # several heads: "age.mean" and so on
            heads: dict[str, dict[str, Tensor]] = {}
            for name, value in found.items():
                head, _, output = name.rpartition(".")
                heads.setdefault(head, {})[output] = value
            return JointPrediction({head: self._prediction(values) for head, values in heads.items()}, **novelty)
        aleatoric, epistemic = found["aleatoric"], found["epistemic"].clamp_min(0)
        none, unknown = torch.zeros_like(epistemic), torch.full_like(epistemic, torch.nan)
        if "mean" in found:
            mean, std = found["mean"], found["std"]
            return GaussianPrediction(mean, aleatoric, epistemic, none, unknown, mean[None], std[None], **novelty)
        probs = found["probabilities"]
        parts = (probs, probs.log(), aleatoric, epistemic, none, torch.full_like(probs, torch.nan))
        if probs.shape == aleatoric.shape:
            return BernoulliPrediction(*parts, torch.log1p(-probs), **novelty)
        return CategoricalPrediction(*parts, **novelty, axis=1 if probs.shape[2:] == aleatoric.shape[1:] else -1)


def file_answers(format: str, content: bytes, x: Inputs) -> dict[str, Tensor]:
    """Returns what the content of a file answers to inputs, by name."""
    if format == "onnx":
        return run_onnx(onnx_session(content), x)
    answers: dict[str, Tensor] = torch.export.load(io.BytesIO(content)).module()(x)
    return answers


def _check(model: Any, samples: int, seed: int, format: str, metadata: Any) -> None:
    """Raises unless model, format, packages, draws and metadata are fit for an export."""
    members: Any = getattr(model, "members", [model])
    if any(not m.latents if isinstance(m, IBNN) else getattr(m, "random", True) for m in members):
        raise TypeError(complaint("model", "an IBNN, Plain or Ensemble", type(model).__name__, "Convert it first."))
    check.choice("format", format, PACKAGES)
    for package in PACKAGES[format]:
        if importlib.util.find_spec(package) is None:
            remedy = "Run: pip install -c constraints.txt '.[export]' in a clone of the repository, or use \"torch\"."
            raise ModuleNotFoundError(complaint(package, "installed, to export to ONNX", "none", remedy), name=package)
    check.seed(seed)
    check.integer("samples", samples, remedy="Pass samples=5.")
    try:
        json.dumps(dict(metadata) if metadata is not None else {})
    except Exception as error:
        raise ValueError(complaint("metadata", "a dict that JSON can hold", error, "Leave the rest out.")) from error


def _check_example(example: Inputs, pixels: Pixels | None) -> None:
    """Raises unless every input is a tensor of the batch and, with `pixels`, one of images with as many channels."""
    if isinstance(example, str | os.PathLike):
        raise TypeError(complaint("example", "inputs", f"the path {example}", "Pass export(model, example, path)."))
    rows = batch_length(example)
    args, kwargs = call_arguments(example)
    for part in (*args, *kwargs.values()):
        if not isinstance(part, Tensor) or part.dim() == 0 or len(part) != rows:
            got = f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            remedy = "Wrap the network in a module that fills in what is not of the batch."
            raise ValueError(complaint("example", f"tensors of {rows} rows each", got, remedy))
    if pixels is not None:
        counts = [len(v) for v in pixels if hasattr(v, "__len__")] if isinstance(pixels, tuple | list) else []
        if not isinstance(example, Tensor) or example.dim() != 4 or counts != [example.shape[1]] * 2:
            got = f"{counts or pixels} for {[tuple(t.shape) for t in tensors(example)]}"
            remedy = "Pass pixels=(means, stds) for one tensor of images (B, C, H, W), or leave it out."
            raise ValueError(complaint("pixels", "a mean and a deviation of every channel", got, remedy))
