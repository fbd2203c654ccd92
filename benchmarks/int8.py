"""What does INT8 do to the answers of an exported LeNet? Prints (and with --json writes) scores and sizes.

    python benchmarks/int8.py [--json FILE]

scikit-learn's digits, enlarged to 28 × 28: 600 to train on, 1,197 to test. onnxruntime quantises the exported file,
dynamically (weights beforehand, activations at run time) and statically (both, by 200 training images); only the
layers, not the softmax and the entropies after them.
"""

import tempfile
from pathlib import Path
from typing import Any

import onnxruntime
import report
import torch
import torch.nn.functional as F
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from sklearn.datasets import load_digits
from torch import Tensor

import ibnn
from ibnn import metrics
from ibnn.nets import LeNet

TRAIN, STEPS, BATCH, COMPONENTS, SAMPLES = 600, 400, 60, 4, 5
LAYERS = ["Conv", "Gemm", "MatMul"]


class Reader(CalibrationDataReader):
    """Hands out calibration images, 20 at a time."""

    def __init__(self, x: Tensor) -> None:
        self.parts = iter(x.split(20))

    def get_next(self) -> dict[str, Any] | None:
        part = next(self.parts, None)
        return None if part is None else {"x": part.numpy()}


def trained(x: Tensor, y: Tensor) -> ibnn.IBNN:
    model = ibnn.convert(LeNet(), components=COMPONENTS, prior_std=0.3, seed=0)
    options = {"lr": 2e-3, "latent_lr": 2e-3, "schedule": {"kind": "constant"}, "clip": 0.0}
    ibnn.fit(model, (x, y), steps=STEPS, batch_size=BATCH, beta=1.0, beta_warmup=0.0, quiet=True, **options)
    return model.eval()


def scores(path: Path, x: Tensor, y: Tensor) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    parts = [session.run(["probabilities", "epistemic"], {"x": part.numpy()}) for part in x.split(50)]
    probs, epistemic = (torch.cat([torch.from_numpy(part[i]) for part in parts]) for i in (0, 1))
    found = metrics.scores(probs, probs.clamp_min(1e-12).log(), y, ("nll", "ece", "error"))
    found |= {"mean_epistemic": epistemic.mean().item()}
    return {name: round(value, 4) for name, value in found.items()} | {"bytes": path.stat().st_size}


def main() -> None:
    """Trains, exports, quantises and prints."""
    options = report.parser(__doc__).parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    small = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    x, y = F.interpolate(small, (28, 28), mode="bilinear"), torch.tensor(digits.target)[order]
    model = trained(x[:TRAIN], y[:TRAIN])
    with tempfile.TemporaryDirectory() as folder:
        full, dynamic, static = (Path(folder, f"{name}.onnx") for name in ("float32", "dynamic", "static"))
        ibnn.export(model, x[:2], full, samples=SAMPLES)
        quantize_dynamic(full, dynamic, op_types_to_quantize=LAYERS, weight_type=QuantType.QUInt8)
        quantize_static(
            full, static, Reader(x[:200]), op_types_to_quantize=LAYERS, per_channel=True, weight_type=QuantType.QInt8
        )
        result = {path.stem: scores(path, x[TRAIN:], y[TRAIN:]) for path in (full, dynamic, static)}
    recipe = {"net": "lenet", "train": TRAIN, "test": len(x) - TRAIN, "steps": STEPS, "batch_size": BATCH}
    recipe |= {"components": COMPONENTS, "samples": SAMPLES, "seed": 0}
    report.tell(result | {"recipe": recipe}, options.json, "onnxruntime", "onnx")


if __name__ == "__main__":
    main()
