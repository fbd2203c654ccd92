"""What `ibnn.calibrate` and temperature scaling do with few held-out labels.

    python experiments/few_labels.py                             # this version, cells "… after"
    PYTHONPATH=OLD/src python experiments/few_labels.py --before  # another checkout, cells "… before"
    python experiments/few_labels.py --table

A cell holds, for each number of labels and each draw of the held-out rows, the NLL of fresh test rows over that of the
network left alone (in regression: 1 + the difference in nats). Form and size of the prices were chosen among some 35
variants, by cached outputs of 18 nets: seeds 0 and 1 of the problems in `CHOSEN_ON`, variants of them (weight decay,
smoothed labels, short training), wine and MNIST. Seed 0 of "wave" was seen in the first rounds, not in the last choice.
Cells are of seed 2, which no choice saw; digits and breast cancer have the rows of the other seeds, split anew.
"""

import argparse
import copy
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from common import Data, Results, parts
from figures import markdown
from sklearn import datasets
from torch import Tensor, nn

import ibnn
from ibnn.baselines import Plain, scale_temperature
from ibnn.likelihood import Gaussian, Likelihood

LABELS, DRAWS, TEST = (20, 30, 60, 100, 300, 1000), 10, 2_000
CHOSEN_ON = ("digits", "blobs", "moons", "friedman", "cancer")
OTHERS = ("digits cnn", "wave")


def mlp(inputs: int, outputs: int) -> nn.Module:
    """A network with two hidden layers."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def cnn() -> nn.Module:
    """A small network for images of 8 × 8 pixels."""
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(128, 10))


def problem(name: str, seed: int) -> tuple[Data, list[int], nn.Module, int]:
    """Data, how many rows are trained on, held out and tested on, a network, and training steps."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    rows, sizes = 6_000, [300, 1_500, TEST]
    if name.startswith("digits"):
        x, y = map(torch.as_tensor, datasets.load_digits(return_X_y=True))
        x = x.float() / 16
        image = name == "digits cnn"
        return Data(x.view(-1, 1, 8, 8) if image else x, y), [300, 1_000, 497], cnn() if image else mlp(64, 10), 400
    if name == "cancer":
        x, y = map(torch.as_tensor, datasets.load_breast_cancer(return_X_y=True))
        return Data(((x - x.mean(0)) / x.std(0)).float(), y), [150, 120, 299], mlp(30, 2), 300
    if name == "moons":
        x, y = map(torch.as_tensor, datasets.make_moons(rows, noise=0.2, random_state=seed))
        return (
            Data(x.float(), torch.where(torch.rand(rows, generator=generator) < 0.05, 1 - y, y)),
            sizes,
            mlp(2, 2),
            600,
        )
    if name == "blobs":
        centres, y = 2 * torch.randn(5, 10, generator=generator), torch.randint(5, (rows,), generator=generator)
        return Data(centres[y] + 1.7 * torch.randn(rows, 10, generator=generator), y), sizes, mlp(10, 5), 300
    if name == "friedman":
        x, y = map(torch.as_tensor, datasets.make_friedman1(rows, noise=1.0, random_state=seed))
        return Data(2 * x.float() - 1, ((y - 14.4) / 4.9).float()[:, None]), sizes, mlp(10, 1), 300
    x = 4 * torch.rand(rows, 3, generator=generator) - 2
    noise = 0.3 * (1 + x[:, 2:].abs()) * torch.randn(rows, 1, generator=generator)
    return Data(x, torch.sin(2 * x[:, :1]) * x[:, 1:2] + noise), sizes, mlp(3, 2), 300


def train(net: nn.Module, data: Data, likelihood: Likelihood | None, steps: int, seed: int) -> nn.Module:
    """Trains as anyone would: Adam, batches of 100."""
    parameters = [*net.parameters(), *(likelihood.parameters() if likelihood else [])]
    optimiser, generator = torch.optim.Adam(parameters, 3e-3), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(len(data.y), (100,), generator=generator)
        output, y = net(data.x[rows]), data.y[rows]
        optimiser.zero_grad()
        (likelihood.terms(output, y).loss if likelihood else F.cross_entropy(output, y)).backward()
        optimiser.step()
    return net.eval()


def cell(name: str, seed: int) -> dict[str, Any]:
    """Ratios by method and number of labels."""
    data, sizes, net, steps = problem(name, seed)
    fitted, pool, test = parts(data, sizes, seed)
    regression = {"friedman": Gaussian(init_std=0.5), "wave": Gaussian(noise="predicted")}.get(name)
    train(net, fitted, regression, steps, seed)

    def nll(method: Any, draws: Tensor) -> float:
        with torch.no_grad():
            losses, counts = method.likelihood.losses(draws, test.y)
        return float(losses.sum() / counts.sum())

    logits = ibnn.draws(Plain(net, copy.deepcopy(regression)), test.x)
    alone = nll(Plain(net, copy.deepcopy(regression)), logits)
    found: dict[str, Any] = {"nll left alone": alone, "temperature scaling": {}, "calibrate": {}, "chosen": {}}
    for labels in (count for count in LABELS if count <= sizes[1]):
        ratios: dict[str, list[float]] = {"temperature scaling": [], "calibrate": []}
        chosen = []
        for draw in range(DRAWS):
            rows = torch.randperm(sizes[1], generator=torch.Generator().manual_seed(1000 * labels + draw))[:labels]
            valid = (pool.x[rows], pool.y[rows])
            plain = Plain(net, copy.deepcopy(regression))
            scale_temperature(plain, valid)
            model = ibnn.convert(net, seed=0, likelihood=copy.deepcopy(regression) or "categorical")
            report = ibnn.calibrate(model, valid, progress=False)
            chosen.append((report.scale, report.temperature))
            scored = {"temperature scaling": nll(plain, logits)}
            scored["calibrate"] = nll(model, ibnn.draws(model, test.x, samples=5))
            for method, value in scored.items():
                ratios[method].append(round(1 + value - alone if regression else value / alone, 4))
        for method, values in ratios.items():
            found[method][str(labels)] = values
        found["chosen"][str(labels)] = chosen
    return found


def table(results: Results) -> str:
    """Mean and worst ratios over all problems, before and after."""
    rows = []
    for labels in map(str, LABELS):
        row = [labels]
        for method in ("temperature scaling", "calibrate"):
            for version in ("before", "after"):
                cells = [
                    c[method][labels] for n, c in results.cells.items() if n.endswith(version) and labels in c[method]
                ]
                means = [mean(values) for values in cells]
                row.append(f"{mean(means):.3f} / {max(means):.3f} / {max(map(max, cells)):.2f}" if cells else "")
        rows.append(row)
    head = ["labels", "scaling before", "scaling now", "calibrate before", "calibrate now"]
    return markdown([head, *rows])


def main() -> None:
    """Runs what is missing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("few_labels", (__doc__ or "").strip().split("\n\n")[-1].replace("\n", " "))
    for name in () if options.table else (*CHOSEN_ON, *OTHERS):
        results.run(f"{name} {'before' if options.before else 'after'}", lambda name=name: cell(name, 2))
    print(table(results))


if __name__ == "__main__":
    main()
