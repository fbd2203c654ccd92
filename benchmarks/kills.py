"""Does anything get lost when a process is killed? Prints (and with --json writes) what SIGKILL left.

    python benchmarks/kills.py [--kills 100] [--seconds 60] [--only NAME ...] [--json FILE]

Each operation runs in a child process that is killed after a random time; then it is called again. *Resumed*
operations (`fit`, `sample`, jobs) are called until one of them ends, after three kills at most, and must end with the
bits of a run that nobody killed. *Replaced* files (`save`, `export`, `calibrate`) alternate between two contents; after
each kill the file must hold one of the two, whole. A child that ended before its kill is not counted.
"""

import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import onnxruntime  # noqa: F401  loaded once, before the forks
import report
import torch
import torch.onnx
from torch import Tensor, nn

import ibnn
import ibnn.sampling.loop as chains
from ibnn.files.export import file_answers
from ibnn.files.saving import load, save_pretrained
from ibnn.lab.job import Job
from ibnn.lab.jobs import read_run, run
from ibnn.lab.runs import RunFolder

SEQUENCE = 3  # kills before an operation may end
GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(96, 6, generator=GENERATOR), torch.randint(3, (96,), generator=GENERATOR)
JOB: dict[str, Any] = {"net": "mlp", "net_options": {"hidden": 16}, "data": "two-moons", "examples": 120, "valid": 40}
JOB |= {"method_options": {"components": 2}, "samples": 2}
JOB |= {"train": {"epochs": 4, "batch_size": 20, "checkpoint_every": 2}}
SAMPLING = {"samples": 20, "warmup": 20, "thin": 2}


def model(seed: int = 0) -> ibnn.IBNN:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    return ibnn.convert(net, components=2, seed=seed).eval()


def digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# --------------------------------------------------------------------- resumed: returns what the operation ended with


def fit(folder: Path) -> str:
    trained = model()
    options: dict[str, Any] = {"epochs": 6, "batch_size": 16, "checkpoint_every": 1, "quiet": True}
    ibnn.fit(trained, (X[:64], Y[:64]), (X[64:], Y[64:]), run_dir=folder, **options)
    return digest(trained.state_dict())


def sample(folder: Path) -> str:
    chains.EVERY = 0.0  # a checkpoint after each step
    options: dict[str, Any] = {"progress": False, **SAMPLING}
    found = ibnn.sample(model(), (X, Y), run_dir=folder, **options)
    return digest({"z": found.z, "energy": found.energy})


def job(folder: Path, **more: Any) -> str:
    run(Job(**JOB, **more), folder / "run", quiet=True)
    home = RunFolder(folder / "run")
    return digest({**read_run(home.path).model.state_dict(), **home.answers()})


def prune(folder: Path) -> str:
    return job(folder, prune={"keep": 0.5, "epochs": 2})


# ----------------------------------------------------------- replaced: writes content 0 or 1; reads what is there


def save(folder: Path, which: int) -> None:
    save_pretrained(model(which), folder / "model")


def saved(folder: Path) -> str:
    return digest(load(folder / "model", model().component(0)).state_dict())


def calibrate(folder: Path, which: int) -> None:
    own = model(which)
    ibnn.calibrate(own, (X, Y), progress=False)
    save_pretrained(own, folder / "model")


def export(folder: Path, which: int, format: str = "torch") -> None:
    ibnn.export(model(which), X[:3], folder / "file", samples=2, format=format)  # type: ignore[arg-type]


def exported(folder: Path, format: str = "torch") -> str:
    return digest(file_answers(format, (folder / "file").read_bytes(), X))


def export_onnx(folder: Path, which: int) -> None:
    export(folder, which, "onnx")


def exported_onnx(folder: Path) -> str:
    return exported(folder, "onnx")


RESUMED: dict[str, Callable[[Path], str]] = {
    "fit": fit,
    "sample": sample,
    "prune job": prune,
}
REPLACED: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], str]]] = {
    "save": (save, saved),
    "calibrate and save": (calibrate, saved),
    "export to torch": (export, exported),
    "export to ONNX": (export_onnx, exported_onnx),
}


class Child:
    """A fork that does something and writes what it returns, or the error, to a file."""

    def __init__(self, work: Callable[[], Any], answer: Path) -> None:
        self.answer = answer
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                answer.write_text(str(work()))
                code = 0
            except BaseException as error:
                answer.write_text(f"{type(error).__name__}: {error}")
            finally:
                os._exit(code)

    def killed_after(self, seconds: float) -> bool:
        """Kills it at that time; returns whether it was still running."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.status = status
                return False
            time.sleep(0.001)
        os.kill(self.pid, signal.SIGKILL)
        _, self.status = os.waitpid(self.pid, 0)
        return os.WIFSIGNALED(self.status)

    def result(self) -> str:
        """Waits for its end; returns what it wrote, raises if it failed."""
        _, status = os.waitpid(self.pid, 0)
        if status:
            raise RuntimeError(self.answer.read_text() if self.answer.exists() else f"status {status}")
        return self.answer.read_text()


class Counts:
    """What happened to one operation."""

    def __init__(self) -> None:
        self.kills = self.runs = 0
        self.wrong: list[str] = []

    def check(self, found: Callable[[], str], expected: Iterable[str]) -> None:
        self.runs += 1
        try:
            if (value := found()) not in set(expected):
                self.wrong.append(f"other bits: {value[:12]}")
        except Exception as error:
            self.wrong.append(f"{type(error).__name__}: {error}")


def resumed(work: Callable[[Path], str], home: Path, kills: int, seconds: float, chance: random.Random) -> Counts:
    """Kills an operation again and again, lets it end, and compares its bits with those of a run left alone."""
    began, counts, answer = time.monotonic(), Counts(), home / "answer"
    expected = Child(lambda: work(home / "alone"), answer).result()
    whole = time.monotonic() - began
    while counts.kills < kills and time.monotonic() - began < seconds:
        place = home / f"run{counts.runs}"
        for _ in range(SEQUENCE):
            child = Child(lambda place=place: work(place), answer)  # type: ignore[misc]
            if not child.killed_after(chance.uniform(0.02, 0.9) * whole):
                break
            counts.kills += 1
        counts.check(lambda place=place: Child(lambda: work(place), answer).result(), {expected})  # type: ignore[misc]
        shutil.rmtree(place)
    return counts


def replaced(
    write: Callable[[Path, int], None],
    read: Callable[[Path], str],
    home: Path,
    kills: int,
    seconds: float,
    chance: random.Random,
) -> Counts:
    """Kills a writer again and again; after each kill a new process must read one of the two contents."""
    began, counts, answer, place = time.monotonic(), Counts(), home / "answer", home / "place"
    place.mkdir()
    expected, whole = [], 0.0
    for which in (1, 0):
        before = time.monotonic()
        Child(lambda which=which: write(place, which), answer).result()  # type: ignore[misc]
        whole = time.monotonic() - before
        expected.append(Child(lambda: read(place), answer).result())
    assert expected[0] != expected[1]
    while counts.kills < kills and time.monotonic() - began < seconds:
        which = chance.randrange(2)
        child = Child(lambda which=which: write(place, which), answer)  # type: ignore[misc]
        if child.killed_after(chance.uniform(0.3, 1.05) * whole):
            counts.kills += 1
            counts.check(lambda: Child(lambda: read(place), answer).result(), expected)
    Child(lambda: write(place, 0), answer).result()  # which removes what killed writers left
    left = sorted(path.name for path in place.rglob("*") if path.name.endswith((".tmp", ".new", ".lock")))
    counts.wrong += [f"left over: {name}" for name in left]
    return counts


def main() -> None:
    """Kills and prints."""
    parser = report.parser(__doc__)
    parser.add_argument("--kills", type=int, default=100, help="kills of each operation")
    parser.add_argument("--seconds", type=float, default=60.0, help="at most, for each operation")
    parser.add_argument("--only", nargs="*", choices=[*RESUMED, *REPLACED], help="these operations")
    options = parser.parse_args()
    torch.set_num_threads(1)  # so that forks are safe
    with tempfile.TemporaryDirectory() as home:
        export(Path(home), 0)  # loads what exporting needs, once, before the forks
    result: dict[str, Any] = {}
    for name in options.only or [*RESUMED, *REPLACED]:
        began, limits = time.monotonic(), (options.kills, options.seconds, random.Random(name))
        with tempfile.TemporaryDirectory() as home:
            if name in RESUMED:
                counts = resumed(RESUMED[name], Path(home), *limits)
            else:
                counts = replaced(*REPLACED[name], Path(home), *limits)
        found = {"kills": counts.kills, "compared": counts.runs, "wrong": len(counts.wrong), "first": counts.wrong[:3]}
        result[name] = found | {"seconds": round(time.monotonic() - began, 1)}
        report.tell(result, options.json)  # after each operation: a run that ends early leaves what it found
    sys.exit(any(row["wrong"] for row in result.values()))


if __name__ == "__main__":
    main()
