"""What does an answer with uncertainty cost in onnxruntime? Prints (and with --json writes) ratios to the plain net.

    python benchmarks/export.py [--repeats 30] [--nets lenet wideresnet] [--json FILE]

The exported iBNN (8 components, 5 draws of each: 40 rows for every input) against the exported plain network, on one
core, in CPU time, for batches of 1 and 64 (a sixth of the repeats). The two alternate; medians are compared. 40
separate calls have ratio 40.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import report
import torch
from torch import nn

import ibnn
from ibnn.baselines import Plain
from ibnn.nets import VGG16, LeNet, WideResNet, mlp

COMPONENTS, SAMPLES, BATCHES = 8, 5, (1, 64)


class Recurrent(nn.Module):
    """A GRU that reads an image of digits row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.head = nn.GRU(8, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.steps(x)[0][:, -1])
        return scores


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp 64-256-256-10": (lambda: mlp(64, 10), (64,)),
    "gru, 8 steps": (Recurrent, (8, 8)),
    "lenet": (LeNet, (1, 28, 28)),
    "vgg16, quarter width": (lambda: VGG16(width=0.25), (3, 32, 32)),
    "wideresnet-10-2": (lambda: WideResNet(depth=10, width=2), (3, 32, 32)),
}


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def seconds(asked: onnxruntime.InferenceSession, x: torch.Tensor) -> float:
    feed = {"x": x.numpy()}
    start = time.process_time()
    asked.run(None, feed)
    return time.process_time() - start


def compare(make: Callable[[], nn.Module], shape: tuple[int, ...], repeats: int, folder: Path) -> dict[str, object]:
    net, x = make().eval(), torch.randn(max(BATCHES), *shape)
    model = ibnn.convert(net, components=COMPONENTS, seed=0)
    whole = ibnn.export(model, x, folder / "whole.onnx", samples=SAMPLES)
    plain = ibnn.export(Plain(net), x, folder / "plain.onnx")
    sessions = session(whole.path), session(plain.path)
    found: dict[str, object] = {"bytes": whole.bytes, "plain_bytes": plain.bytes, "draw_bytes": whole.draw_bytes}
    for batch in BATCHES:
        count = 1 + (repeats if batch == 1 else -(-repeats // 6))  # one to warm up
        pairs = [(seconds(sessions[0], x[:batch]), seconds(sessions[1], x[:batch])) for _ in range(count)][1:]
        times = report.compared(pairs, "ms", "plain_ms")
        found[f"batch {batch}"] = times | {"ratio": round(times["ratio"], 2)}
    return found


def main() -> None:
    """Measures and prints."""
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, object] = {name: compare(*NETS[name], options.repeats, Path(folder)) for name in options.nets}
    recipe = {"components": COMPONENTS, "samples": SAMPLES, "repeats": options.repeats, "threads": 1}
    report.tell(result | {"recipe": recipe}, options.json, "onnxruntime")


if __name__ == "__main__":
    main()
