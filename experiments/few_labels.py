"""What `ibnn.calibrate` and temperature scaling do with few held-out labels: python experiments/few_labels.py

A cell holds, for each number of labels and each draw of the held-out rows, the NLL of fresh test rows over that of the
network left alone (in regression: 1 + the difference in nats). Form and size of the prices were chosen among some 35
variants, by cached outputs of 18 nets: seeds 0 and 1 of the problems in `CHOSEN_ON`, variants of them (weight decay,
smoothed labels, short training), wine and MNIST. Seed 0 of "wave" was seen in the first rounds, not in the last choice.
Cells are of seed 2, which no choice saw; digits and breast cancer have the rows of the other seeds, split anew.
"""

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
from ibnn.likelihood.temperature import best_temperature

LABELS, DRAWS, TEST = (20, 30, 60, 100, 300, 1000), 10, 2_000
CHOSEN_ON = ("digits", "blobs", "moons", "friedman", "cancer")
OTHERS = ("digits cnn", "wave")
METHODS = ("best temperature", "temperature scaling", "calibrate")  # the first without a penalty


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
    found: dict[str, Any] = {"nll left alone": alone, "chosen": {}, **{method: {} for method in METHODS}}
    for labels in (count for count in LABELS if count <= sizes[1]):
        ratios: dict[str, list[float]] = {method: [] for method in METHODS}
        chosen = []
        for draw in range(DRAWS):
            rows = torch.randperm(sizes[1], generator=torch.Generator().manual_seed(1000 * labels + draw))[:labels]
            valid = (pool.x[rows], pool.y[rows])
            plain, free = (Plain(net, copy.deepcopy(regression)) for _ in range(2))
            scale_temperature(plain, valid)
            free.likelihood.set_temperature(best_temperature(free.likelihood, ibnn.draws(free, valid[0]), valid[1]))
            model = ibnn.convert(net, seed=0, likelihood=copy.deepcopy(regression) or "categorical")
            report = ibnn.calibrate(model, valid, progress=False)
            chosen.append((report.scale, report.temperature))
            scored = {"best temperature": nll(free, logits), "temperature scaling": nll(plain, logits)}
            scored["calibrate"] = nll(model, ibnn.draws(model, test.x, samples=5))
            for method, value in scored.items():
                ratios[method].append(round(1 + value - alone if regression else value / alone, 4))
        for method, values in ratios.items():
            found[method][str(labels)] = values
        found["chosen"][str(labels)] = chosen
    return found


def table(results: Results) -> list[list[str]]:
    """Mean and worst ratio over all problems and draws, by number of labels and method."""
    rows = [["labels", *(f"{method}: {kind}" for method in METHODS for kind in ("mean", "worst"))]]
    for labels in map(str, LABELS):
        row = [labels]
        for method in METHODS:
            cells = [cell[method][labels] for cell in results.cells.values() if labels in cell[method]]
            row += [f"{mean(map(mean, cells)):.3f}", f"{max(map(max, cells)):.2f}"] if cells else ["–", "–"]
        rows.append(row)
    return rows


def main() -> None:
    """Runs what is missing."""
    torch.set_num_threads(1)
    results = Results("few_labels", (__doc__ or "").strip().split("\n\n")[-1].replace("\n", " "))
    for name in (*CHOSEN_ON, *OTHERS):
        results.run(name, lambda name=name: cell(name, 2))
    print(markdown(table(results)))


if __name__ == "__main__":
    main()
