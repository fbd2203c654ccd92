"""A training script that tests start, kill, and run on several workers: python fit_job.py OUT [--key=value …].

Also what several tests of training share.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import ibnn

torch.set_num_threads(1)
JOB = str(Path(__file__))


def make_net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))


def make_data(rows: int = 203) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 6, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def run(out: Path, *options: str, stderr: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """Starts this script."""
    return subprocess.Popen([sys.executable, JOB, str(out), *options], stderr=stderr, text=True)


class Stop(Exception):
    """What a callback raises to end a run."""


def same(a: ibnn.IBNN, b: ibnn.IBNN) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def close(a: ibnn.IBNN, b: ibnn.IBNN, **tolerance: float) -> None:
    for (name, p), q in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def main() -> None:
    out = Path(sys.argv[1])
    options: dict[str, object] = {}
    for argument in sys.argv[2:]:
        name, _, value = argument.removeprefix("--").partition("=")
        options[name] = value if name in ("net", "run_dir") else eval(value)
    model = ibnn.convert(make_net(str(options.pop("net", "full"))), components=4, seed=0)
    delay = float(options.pop("delay", 0.0))  # type: ignore[arg-type]
    slow = [lambda row, model: time.sleep(delay)]
    x, y = make_data(int(options.pop("rows", 203)))  # type: ignore[call-overload]
    rank = int(os.environ.get("RANK", "0"))
    history = ibnn.fit(model, (x[:160], y[:160]), (x[160:], y[160:]), callbacks=slow, quiet=True, **options)  # type: ignore[arg-type]
    prediction = model.predict(batch for batch in x.split(30))
    if rank == 0:
        state = {"state": model.state_dict(), "rows": list(history.rows), "probs": prediction.probs}
        state |= {"looks": list(history.looks), "prior_std": model.prior_std}
        torch.save(state, out.with_suffix(".tmp"))
        out.with_suffix(".tmp").rename(out)


if __name__ == "__main__":
    main()
