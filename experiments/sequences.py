"""Calibration of recurrent networks and a Transformer that read the digits of scikit-learn row by row.

    python experiments/sequences.py                # goes on where it stopped, then draws the figure
    python experiments/sequences.py --figure       # draws what there is
    python experiments/sequences.py --page         # writes the table into notes/sequences.md
    python experiments/sequences.py --page --check # fails if the page is out of date

An image is a sequence of eight rows of eight pixels. All networks train for as many epochs on the same 500 images, at
the defaults of `ibnn.fit`; nothing was tuned. The same 200 held-out labels fit the temperature (+ T), choose in
`ibnn.calibrate` and steer the noise of `ibnn.fit`; the other 1,097 images test.
"""

import argparse
import sys
from collections.abc import Callable
from functools import cache
from statistics import mean, stdev
from typing import Any

import torch
from common import FIGURES, NOTES, Data, Results, Splits, parts, tempered_scores, train_plain
from figures import markdown
from figures.style import house_style
from sklearn.datasets import load_digits
from tables import fill_in
from torch import Tensor, nn

import ibnn
from ibnn.baselines import Plain
from ibnn.lab.display import png

EPOCHS, SEEDS, SAMPLES = 300, (0, 1, 2), 5
METRICS = {"error": "error %", "nll": "NLL", "ece": "ECE", "nll + T": "NLL + T", "ece + T": "ECE + T"}


class Recurrent(nn.Module):
    """A GRU or LSTM, and a linear layer on its last output."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.head = kind(8, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Transformer(nn.Module):
    """Two encoder layers, and a linear layer on the mean of their outputs."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, width), nn.Parameter(0.02 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x) + self.place).mean(1))


NETS: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: Recurrent(nn.GRU),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "Transformer": Transformer,
}


def data(seed: int) -> Splits:
    """Disjoint random parts of the 1,797 digits."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels).float().view(-1, 8, 8) / 16, torch.tensor(labels)
    return Splits(*parts(Data(x, y), [500, 200, 1097], seed))


@cache
def plain(net: str, seed: int) -> Plain:
    """The network, trained without noise."""
    torch.manual_seed(seed)
    return train_plain(NETS[net](), data(seed).train, epochs=EPOCHS, seed=seed)


def run(net: str, method: str, seed: int) -> dict[str, Any]:
    """One network, trained and scored."""
    train, valid, test = data(seed)
    model: Plain | ibnn.IBNN = plain(net, seed)
    if method == "calibrated":
        model = ibnn.convert(plain(net, seed).net, seed=seed)
        ibnn.calibrate(model, valid)
    elif method == "iBNN":
        torch.manual_seed(seed)
        model = ibnn.convert(NETS[net](), seed=seed)
        ibnn.fit(model, train, valid, epochs=EPOCHS, seed=seed, quiet=True)
    found = tempered_scores(model, valid, test, SAMPLES)
    tempered = {f"{name} + T": found["tempered"][name] for name in ("nll", "ece")}
    sizes = {"nodes": model.nodes, "weights": sum(p.numel() for p in NETS[net]().parameters())}
    return found["test"] | tempered | {"T": found["temperature"]} | ({} if method == "plain" else sizes)


METHODS = ("plain", "calibrated", "iBNN")


def grid(results: Results) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Cells of all seeds by network and method."""
    names = {(net, method): [f"{net}, {method}, seed {seed}" for seed in SEEDS] for net in NETS for method in METHODS}
    return {key: [results.cells[name] for name in listed if name in results.cells] for key, listed in names.items()}


def table(results: Results) -> str:
    """Means over seeds ± their standard deviation."""
    rows = [["network", "method", "seeds", *METRICS.values()]]
    for (net, method), cells in grid(results).items():
        if cells:
            rows.append(
                [net, method, str(len(cells)), *(_text(name, [cell[name] for cell in cells]) for name in METRICS)]
            )
    return markdown(rows).rstrip() + "\n"


def _text(name: str, values: list[float]) -> str:
    factor, digits = (100, 2) if name == "error" else (1, 3)
    spread = f" ± {factor * stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{factor * mean(values):.{digits}f}{spread}"


def draw(results: Results) -> None:
    """NLL and ECE of every seed, method beside method."""
    from matplotlib.figure import Figure

    with house_style():
        figure = Figure(figsize=(7, 2.8), layout="constrained")
        for axes, (key, label) in zip(figure.subplots(1, 2), (("nll", "NLL (nats)"), ("ece", "ECE")), strict=True):
            for number, method in enumerate(METHODS):
                for place, net in enumerate(NETS):
                    values = [cell[key] for cell in grid(results)[net, method]]
                    at = place + 0.22 * (number - 1)
                    label = None if place else method
                    axes.bar(at, mean(values) if values else 0, 0.2, color=f"C{number}", alpha=0.5, label=label)
                    axes.plot([at] * len(values), values, ".", color=f"C{number}")
            axes.set(ylabel=label, xticks=range(len(NETS)), xticklabels=list(NETS))
        axes.legend(frameon=False)
        (FIGURES / "sequences.png").write_bytes(png(figure))


def page(check: bool) -> int:
    """Fills the table in, or says whether it is out of date."""
    return fill_in({NOTES / "sequences.md": {"sequences": table(Results("sequences", __doc__ or ""))}}, check)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--figure", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.page:
        sys.exit(page(options.check))
    torch.set_num_threads(1)
    results = Results("sequences", (__doc__ or "").split("\n\n")[-1].replace("\n", " ").strip())
    for seed in () if options.figure else SEEDS:
        for net in NETS:
            for method in METHODS:
                results.run(f"{net}, {method}, seed {seed}", lambda n=net, m=method, s=seed: run(n, m, s))
    draw(results)
    print(table(results))
