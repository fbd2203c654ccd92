"""Which score of novelty? Candidates compared on pairs that no table of results shows, training images all of them.

    IBNN_DATA=FOLDER python experiments/novelty_choice.py [--cells mnist-17 …]

LeNet on 5,000 MNIST images without two classes, and a small convolutional network on 12,000 CIFAR-10 images without
two: AUROC of those classes, and of eight corruptions, against other training images of the known classes.
`rows` tells how quality grows with the number of reference and held-out inputs. Writes results/novelty-choice.json.
"""

import argparse
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from common import Data, Results, images, train_plain
from novelty import without
from torch import Tensor, nn

import ibnn
from ibnn import metrics
from ibnn.baselines import Plain
from ibnn.nets import LeNet
from ibnn.novelty.measure import measure, see
from ibnn.novelty.nodes import observable
from ibnn.novelty.reference import Reference, fit_layers, log_tail

PAIRS = {"mnist": ((1, 7), (3, 4), (6, 9)), "cifar-10": ((0, 8), (3, 6))}
CELLS = {f"{name}-{a}{b}": (name, (a, b)) for name, pairs in PAIRS.items() for a, b in pairs}


def small() -> nn.Module:
    """Four convolutions with BatchNorm."""
    widths, layers = (3, 32, 48, 64, 96), []
    for number, (width, after) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(width, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if number < 3 else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(96, 8))


def corrupted(x: Tensor) -> dict[str, Tensor]:
    """Eight ways to change images."""
    low, high, generator = float(x.min()), float(x.max()), torch.Generator().manual_seed(5)
    span, kernel = high - low, torch.full((x.shape[1], 1, 3, 3), 1 / 9)
    return {
        "noise": (x + 0.1 * span * torch.randn(x.shape, generator=generator)).clamp(low, high),
        "blur": F.conv2d(x, kernel, padding=1, groups=x.shape[1]),
        "contrast": x.mean((1, 2, 3), keepdim=True) * 0.5 + 0.5 * x,
        "inverted": low + high - x,
        "pixelated": F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0),
        "rotated": x.rot90(1, (2, 3)),
        "uniform": low + span * torch.rand(x.shape, generator=generator),
        "brighter": (x + 0.15 * span).clamp(low, high),
    }


def problem(name: str, classes: tuple[int, int]) -> tuple[Plain, list[Data], dict[str, Tensor]]:
    """A trained network; training, two held-out and comparison images of the known classes; and images to tell."""
    data = images(name, train=True)
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(1))
    known, near = without(classes, Data(data.x[order], data.y[order]))
    count = 5000 if name == "mnist" else 12_000
    ends = (0, count, count + 500, count + 1000, count + 2000)
    parts = [Data(known.x[a:b], known.y[a:b]) for a, b in pairwise(ends)]
    torch.manual_seed(0)
    net = LeNet(classes=8) if name == "mnist" else small()
    model = train_plain(net, parts[0], epochs=12, seed=0)
    return model, parts, {"classes": near[:1000], **corrupted(parts[3].x)}


def layered(model: Plain, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """What every layer sees of inputs, and the network's outputs."""
    layers = observable(model.net)
    seen = [see(model, part, layers, dict.fromkeys(layers, 0)).summaries for part in x.split(500)]
    return [torch.cat([part[name] for part in seen]) for name in layers], ibnn.draws(model, x)[0, 0]


def cell(name: str, classes: tuple[int, int]) -> dict[str, Any]:
    """AUROC of every candidate."""
    model, (train, first, last, test), foreign = problem(name, classes)
    inputs = {"train": train.x[:4000], "first": first.x, "last": last.x, "test": test.x, **foreign}
    found = {key: layered(model, x) for key, x in inputs.items()}
    candidates = _nodes(found, train.y[:4000]) | _answers({key: logits for key, (_, logits) in found.items()})
    for nodes in ("mean + deviation, classes, Fisher", "mean + deviation, Fisher"):
        for answer in ("entropy", "energy", "largest score"):
            pair = (candidates[nodes], candidates[answer])
            ranked = [{k: -log_tail(c["first"].sort().values, v) for k, v in c.items()} for c in pair]
            candidates[f"{nodes}; {answer}: sum"] = {k: ranked[0][k] + ranked[1][k] for k in ranked[0]}
            candidates[f"{nodes}; {answer}: largest"] = {k: ranked[0][k].maximum(ranked[1][k]) for k in ranked[0]}
    auroc = {c: {k: metrics.auroc(v["test"], v[k]) for k in foreign} for c, v in candidates.items()}
    wrong = float((found["test"][1].argmax(1) != test.y).double().mean())
    return {"error": wrong, "auroc": auroc}


def _nodes(found: dict[str, tuple[list[Tensor], Tensor]], labels: Tensor) -> dict[str, dict[str, Tensor]]:
    """Scores by what layers see: all or the last of them, with and without deviations and class means."""
    made: dict[str, dict[str, Tensor]] = {}
    last = found["train"][0][-1].shape[1]
    for what in ("mean", "mean + deviation"):

        def cut(part: Tensor, what: str = what) -> Tensor:
            return part[:, : part.shape[1] // 2] if what == "mean" and part.shape[1] != last else part

        seen = {key: [cut(part) for part in layers] for key, (layers, _) in found.items()}
        for by, of in (("", None), (", classes", labels)):
            distances = _distances(seen, of)
            ranked = {k: -log_tail(distances["first"].sort(1).values, d) for k, d in distances.items()}
            made[f"{what}{by}, Fisher"] = {k: r.sum(0) for k, r in ranked.items()}
            made[f"{what}{by}, largest"] = {k: r.amax(0) for k, r in ranked.items()}
            made[f"{what}{by}, later half"] = {k: r[len(r) // 2 :].sum(0) for k, r in ranked.items()}
            made[f"{what}{by}, last layer"] = {k: r[-1] for k, r in ranked.items()}
    return made


def _distances(seen: dict[str, list[Tensor]], labels: Tensor | None) -> dict[str, Tensor]:
    """Distances (L, B) from the training inputs."""
    train = [part.double() for part in seen["train"]]
    stds = [part.std(0) for part in train]
    scale = torch.cat([1 / s.maximum(0.01 * s.square().mean().sqrt()) for s in stds])
    widths, whole = torch.tensor([[p.shape[1]] * 2 for p in train]), torch.cat([p.mean(0) for p in train])
    reference = Reference(layers=torch.arange(len(train)), widths=widths, shift=whole.float(), scale=scale.float())
    reduced = {key: [reference.reduce(number, part) for number, part in enumerate(x)] for key, x in seen.items()}
    reference.whiten, reference.centres = (part[None] for part in fit_layers(reduced["train"], labels))
    return {key: reference.distances(0, parts) for key, parts in reduced.items()}


def _answers(logits: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Scores by the network's output."""
    scores: dict[str, Callable[[Tensor], Tensor]] = {
        "entropy": lambda x: torch.special.entr(x.softmax(1)).sum(1),
        "energy": lambda x: -x.logsumexp(1),
        "largest score": lambda x: -x.amax(1),
    }
    return {name: {key: score(x) for key, x in logits.items()} for name, score in scores.items()}


def growth() -> dict[str, Any]:
    """Quality of the chosen score by the number of reference inputs and of held-out ones."""
    model, (train, first, last, test), foreign = problem("mnist", (1, 7))
    held = Data(torch.cat([first.x, last.x]), torch.cat([first.y, last.y]))
    rows: dict[str, Any] = {}
    for known, out in ((100, 1000), (300, 1000), (1000, 1000), (3000, 1000), (5000, 1000), (5000, 100), (5000, 300)):
        ibnn.fit_novelty(model, Data(train.x[:known], train.y[:known]), Data(held.x[:out], held.y[:out]))
        score = {k: measure(model, x).score for k, x in {"test": test.x, **foreign}.items()}
        auroc = {k: metrics.auroc(score["test"], score[k]) for k in foreign}
        rows[f"{known} known, {out} held out"] = auroc | {
            "false alarms at 0.05": float((measure(model, test.x).p_value <= 0.05).double().mean())
        }
    return {"rows": rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=[*CELLS, "rows"], default=[*CELLS, "rows"])
    options = parser.parse_args()
    results = Results("novelty-choice", str(__doc__))
    for cell_name in options.cells:
        work = growth if cell_name == "rows" else lambda name=cell_name: cell(*CELLS[name])  # type: ignore[misc]
        results.run(cell_name, work)
