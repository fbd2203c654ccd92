"""Does memory grow? Prints (and with --json writes) the resident megabytes before, midway and after each kind of work.

    python benchmarks/memory_growth.py [--requests 60000] [--only NAME ...] [--json FILE]

*shapes*: 2,000 predictions, each of another input shape (batch and length) of a recurrent network. *conversions*: 200
conversions of a LeNet, each with a prediction. *fits*: 50 short `fit`s of a small network. *requests*: that many
predictions of one row. The first tenth warms up caches and the allocator; growth is counted from there.
The kinds share a process, so that memory freed by one may hide growth of the next: --only runs one by itself.
"""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
from torch import nn

import ibnn
from ibnn import nets


def resident() -> float:
    """Returns the megabytes of this process that are in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * 4096 / 1e6, 1)


class Reader(nn.Module):
    """A GRU over sequences, and a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0][:, -1])


def shapes() -> Callable[[int], object]:
    model = ibnn.convert(Reader(), components=2, seed=0).eval()
    return lambda number: model.predict(torch.randn(1 + number % 40, 1 + number // 40, 4), samples=1)


def conversions() -> Callable[[int], object]:
    net, x = nets.LeNet(), torch.randn(2, 1, 28, 28)
    return lambda number: ibnn.convert(net, seed=number).eval().predict(x, samples=1)


def fits() -> Callable[[int], object]:
    x, y = torch.randn(64, 6), torch.randint(3, (64,))

    def once(number: int) -> None:
        model = ibnn.convert(nets.mlp(6, 3, hidden=16), components=2, seed=number)
        ibnn.fit(model, (x[:48], y[:48]), (x[48:], y[48:]), epochs=2, batch_size=16, quiet=True)

    return once


def requests() -> Callable[[int], object]:
    model = ibnn.convert(nets.mlp(6, 3, hidden=16), components=2, seed=0).eval()
    return lambda number: model.predict(torch.randn(1, 6), samples=1)


WORK = {"shapes": (shapes, 2000), "conversions": (conversions, 200), "fits": (fits, 50), "requests": (requests, 60_000)}


def grown(make: Callable[[], Callable[[int], object]], times: int) -> dict[str, Any]:
    """Returns resident megabytes at four points of the work, and how much the last nine tenths added."""
    work, marks = make(), {times // 10: "tenth", times // 2: "half", times: "end"}
    found: dict[str, Any] = {"times": times, "start": resident()}
    for number in range(times):
        work(number)
        if mark := marks.get(number + 1):
            found[mark] = resident()
    return found | {"growth": round(found["end"] - found["tenth"], 1)}


def main() -> None:
    """Measures and prints."""
    parser = report.parser(__doc__)
    parser.add_argument("--requests", type=int, default=60_000, help="predictions of one row")
    parser.add_argument("--only", nargs="*", choices=[*WORK], help="these kinds of work")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result: dict[str, Any] = {}
    for name in options.only or WORK:
        make, times = WORK[name]
        result[name] = grown(make, options.requests if name == "requests" else times)
        print(name, result[name], file=sys.stderr, flush=True)
    report.tell(result | {"unit": "MB resident, one thread"}, options.json)


if __name__ == "__main__":
    main()
