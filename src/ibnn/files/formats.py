"""EXPORT FORMATS: a traced network as the bytes of an ONNX or a torch file, and what such a file answers."""

import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ibnn.inputs import Inputs, tensors

FACTS = "ibnn"  # name of the metadata in an ONNX file; in torch's it is ibnn.json
PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": ()}


def names(x: Inputs) -> list[str]:
    """Returns what the inputs are called in a file."""
    if isinstance(x, Tensor):
        return ["x"]
    return list(x) if isinstance(x, Mapping) else [f"x{number}" for number in range(len(x))]


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what torch's exporters log about themselves: deprecations, optional packages, steps."""
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


def drop_identities(program: torch.export.ExportedProgram) -> None:
    """Removes multiplications by an identity matrix (see `attention`), which would be as large as a weight."""
    aten = torch.ops.aten
    for node in list(program.graph.nodes):
        if node.target is aten.linear.default and len(node.args) == 2 and node.args[1].target is aten.eye.default:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def _to_onnx(program: torch.export.ExportedProgram, inputs: list[str], outputs: list[str], facts: str) -> bytes:
    given, returned = [f"in.{name}" for name in inputs], [f"out.{name}" for name in outputs]
    made = torch.onnx.export(program, dynamo=True, verbose=False, input_names=given, output_names=returned)
    assert made is not None
    proto = made.model_proto
    graph = proto.graph
    renamed = dict(zip([*given, *returned], [*inputs, *outputs], strict=True))
    renamed |= {name: f"inner.{name}" for name in renamed.values()}  # torch calls values on the way "mean", too
    weights = {value.name for value in graph.initializer}
    for number, node in enumerate(graph.node):
        node.ClearField("metadata_props")  # where in the source it came from: together more than a small network
        node.name = f"n{number}"
        for value in node.output:
            if value not in renamed and value not in weights:
                renamed[value] = f"v{len(renamed)}"  # torch's names are as long as the operators
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.ClearField("metadata_props")
        value.name = renamed.get(value.name, value.name)
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
    outputs = [output.name for output in session.get_outputs()]
    feed = dict(zip(names(x), (t.numpy() for t in tensors(x)), strict=True))
    return dict(zip(outputs, map(torch.from_numpy, session.run(outputs, feed)), strict=True))


def _from_torch(content: bytes, x: Inputs) -> dict[str, Tensor]:
    answers: dict[str, Tensor] = torch.export.load(io.BytesIO(content)).module()(x)
    return answers


WRITERS = {"onnx": _to_onnx, "torch": _to_torch}
READERS = {"onnx": _from_onnx, "torch": _from_torch}  # what a file answers to inputs
