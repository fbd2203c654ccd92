"""Does one pass answer as 40 draws do? Heads and whole networks distilled from iBNNs, dropout networks and ensembles.

    IBNN_DATA=FOLDER python experiments/one_pass.py [--tasks lenet digits …] [--seeds 0 1] [--choose]

Every model is trained by `fit` with a held-out part; `distil` gets the training and held-out inputs without labels.
`--choose` compares widths, copies, epochs and rates by the KL to the draws' answer on held-out inputs that were not
taught; test data inform no choice. Images are corrupted by all kinds at severity 3. Outsiders are MNIST for
Fashion-MNIST. Seconds are those of a busy machine, one thread. Writes results/one_pass.json.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import NORM, Data, Results, images, parts
from sklearn.datasets import load_breast_cancer, load_digits, make_friedman1
from torch import Tensor, nn

import ibnn
from ibnn import metrics
from ibnn.baselines import MCDropout, Plain
from ibnn.baselines.plain import find_temperature
from ibnn.data.corruptions import KINDS, corrupt
from ibnn.likelihood import LIKELIHOODS
from ibnn.nets import CifarResNet, LeNet, mlp
from ibnn.one_pass import mean_network, rank_correlation

MEMBERS = 4


class Task(NamedTuple):
    """A network, its data and its training."""

    net: Callable[[], nn.Module]
    data: Callable[[int], tuple[Data, Data, Data]]  # train, held-out, test
    epochs: int = 30
    likelihood: str = "categorical"
    outside: Callable[[], Tensor] | None = None
    corrupted: Callable[[], Data] | None = None


def image_parts(name: str, rows: int) -> Callable[[int], tuple[Data, Data, Data]]:
    """Random training images, 1,000 held-out ones and the test set."""

    def data(seed: int) -> tuple[Data, Data, Data]:
        train, valid = parts(images(name, train=True), [rows, 1_000], seed)
        return train, valid, images(name, train=False)

    return data


def corrupted_images(name: str) -> Callable[[], Data]:
    """Test images, a fifth of them corrupted by each kind."""

    def data() -> Data:
        test, (mean, std) = images(name, train=False), NORM[name]
        pixels = (test.x * std + mean).clamp(0, 1)
        chunks = zip(KINDS, pixels.chunk(len(KINDS)), strict=True)
        return Data((torch.cat([corrupt(chunk, kind, 3) for kind, chunk in chunks]) - mean) / std, test.y)

    return data


def table(load: Callable[..., Any]) -> Callable[[int], tuple[Data, Data, Data]]:
    """Standardised columns; a quarter is the test set, a tenth held out."""

    def data(seed: int) -> tuple[Data, Data, Data]:
        x, y = (torch.as_tensor(part) for part in load(return_X_y=True))
        x = ((x - x.mean(0)) / x.std(0).clamp_min(1e-6)).float()
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        cuts = order.split([len(x) - len(x) // 4 - len(x) // 10, len(x) // 10, len(x) // 4])
        return tuple(Data(x[rows], y[rows]) for rows in cuts)  # type: ignore[return-value]

    return data


def friedman(seed: int) -> tuple[Data, Data, Data]:
    """Friedman's first function of ten uniform inputs, with noise of deviation 1."""
    x, y = (torch.as_tensor(part).float() for part in make_friedman1(3000, noise=1.0, random_state=seed))
    x, y = (x - 0.5) * 12**0.5, ((y - 14.4) / 5)[:, None]
    return Data(x[:800], y[:800]), Data(x[800:1000], y[800:1000]), Data(x[1000:], y[1000:])


def rows_of_digits(seed: int) -> tuple[Data, Data, Data]:
    """The digits as sequences of rows."""
    return tuple(Data(d.x.unflatten(1, (8, 8)), d.y) for d in table(load_digits)(seed))  # type: ignore[return-value]


class Transformer(nn.Module):
    """Two encoder layers, and a linear layer on the mean of their outputs."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, width), nn.Parameter(0.02 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x) + self.place).mean(1))


def mnist() -> Tensor:
    """Images of other things than clothes."""
    return images("mnist", train=False).x


FASHION: Any = (image_parts("fashion-mnist", 5_000),)
TASKS: dict[str, Task] = {
    "lenet": Task(lambda: LeNet(width=2), *FASHION, outside=mnist, corrupted=corrupted_images("fashion-mnist")),
    "digits": Task(lambda: mlp(64, 10, hidden=64), table(load_digits)),
    "breast cancer": Task(lambda: mlp(30, 2, hidden=64), table(load_breast_cancer)),
    "regression": Task(lambda: mlp(10, 1, hidden=64), friedman, likelihood="gaussian"),
    "transformer": Task(Transformer, rows_of_digits),
    "resnet20": Task(
        lambda: CifarResNet(depth=20, width=0.5),
        image_parts("cifar-10", 5_000),
        epochs=10,
        corrupted=corrupted_images("cifar-10"),
    ),
}


def trained(task: Task, kind: str, seed: int) -> tuple[Any, float]:
    """A model, trained, and the seconds it took."""
    train, valid, _ = task.data(seed % 1000)
    torch.manual_seed(seed)
    net = task.net()
    if kind == "iBNN":
        model: Any = ibnn.convert(net, seed=seed, likelihood=task.likelihood)
    elif kind == "dropout":
        model = MCDropout(net, rate=0.1, likelihood=LIKELIHOODS[task.likelihood]())
    else:
        model = Plain(net, LIKELIHOODS[task.likelihood]())
    began = time.monotonic()
    options: Any = {"epochs": task.epochs, "evaluate_every": task.epochs, "seed": seed, "quiet": True, "novelty": False}
    ibnn.fit(model, train, valid, **options)
    return model.eval(), time.monotonic() - began


class Judge:
    """Scores answers on the test data of a task, beside those of the reference model."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task = task
        self.train, self.valid, self.test = task.data(seed)
        self.corrupted = task.corrupted() if task.corrupted else None
        self.outside = task.outside() if task.outside else None
        self.x = torch.cat([self.train.x, self.valid.x])
        self.reference: Any = None

    def __call__(self, model: Any, samples: int = 5, *, refer: bool = False) -> dict[str, Any]:
        """Error (or RMSE), NLL and the rest; rank correlation of the epistemic part with that of the reference."""
        p = model.predict(self.test.x, samples=samples, progress=False, novelty=False)
        found: dict[str, Any] = dict(model.likelihood.score(p, self.test.y))
        if refer:
            self.reference = p
        if hasattr(p, "labels"):
            right = p.labels == self.test.y
            found["misclassification AUROC"] = metrics.auroc(p.total[right], p.total[~right])
        if self.reference is not None and float(p.epistemic.max()) > 1e-9:
            found["rank"] = rank_correlation(p.epistemic.flatten(), self.reference.epistemic.flatten())
        if self.corrupted is not None:
            q = model.predict(self.corrupted.x, samples=samples, progress=False, novelty=False)
            found["corrupted nll"] = model.likelihood.score(q, self.corrupted.y)["nll"]
        if self.outside is not None and float(p.epistemic.max()) > 1e-9:
            q = model.predict(self.outside, samples=samples, progress=False, novelty=False)
            found["OOD AUROC"] = metrics.auroc(p.epistemic, q.epistemic)
        return found


def tempered(net: nn.Module, model: Any, valid: Data) -> Plain:
    """A plain network with the temperature, or the noise, of held-out labels."""
    own = ibnn.Gaussian() if isinstance(model.likelihood, ibnn.Gaussian) else ibnn.Categorical()
    plain = Plain(net, own)
    if isinstance(own, ibnn.Gaussian) and own.log_std is not None:
        own.log_std.data.copy_(getattr(model.likelihood, "log_std", own.log_std).data.mean())
    plain.likelihood.set_temperature(find_temperature(plain, valid))
    return plain


def distilled(model: Any, judge: Judge, seed: int, **options: Any) -> dict[str, Any]:
    """Scores and agreement of a student, and what it cost."""
    began = time.monotonic()
    fast = ibnn.distil(model, judge.x, seed=seed, progress=False, **options)
    seconds = time.monotonic() - began
    report = next(iter(fast.report.values()))
    return judge(fast) | {"held-out": report._asdict(), "distilling seconds": round(seconds, 1)}


def costs(model: Any, fast: Any, net: nn.Module, x: Tensor) -> dict[str, float]:
    """Bytes of exported files, and milliseconds of a batch of 64: in torch, and of one input in onnxruntime."""
    import onnxruntime

    def milliseconds(run: Callable[[], Any], times: int = 15) -> float:
        run()
        taken = []
        for _ in range(times):
            began = time.perf_counter()
            run()
            taken.append(1000 * (time.perf_counter() - began))
        return sorted(taken)[len(taken) // 2]

    found = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for name, own in (("draws", model), ("one pass", fast), ("plain", Plain(net, ibnn.Categorical()))):
            written = ibnn.export(own, x[:2], Path(folder) / f"{name}.onnx", novelty=False)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            session = onnxruntime.InferenceSession(written.path, options, providers=["CPUExecutionProvider"])
            one = {session.get_inputs()[0].name: x[:1].numpy()}
            found[f"{name}: bytes"] = written.bytes
            found[f"{name}: onnx ms"] = milliseconds(lambda session=session, one=one: session.run(None, one))
            found[f"{name}: predict ms"] = milliseconds(lambda own=own: own.predict(x[:64], novelty=False), 5)
        found["plain pass ms"] = milliseconds(lambda: net(x[:64]))
    return found


def single(task: Task, kind: str, seed: int) -> dict[str, Any]:
    """A model's draws, its mean network and its students."""
    judge = Judge(task, seed)
    model, seconds = trained(task, kind, seed)
    net, samples = mean_network(model), 40 // model.components  # dropout has one component
    found: dict[str, Any] = {"training seconds": round(seconds, 1), "40 draws": judge(model, samples, refer=True)}
    found["16 draws"] = judge(model, 16 // model.components)
    found["mean network + T"] = judge(tempered(net, model, judge.valid))
    found["one pass"] = distilled(model, judge, seed, samples=samples)
    found["one pass, whole"] = distilled(model, judge, seed, samples=samples, whole=True)
    if kind == "iBNN" and task.likelihood == "categorical" and judge.x.is_floating_point():
        fast = ibnn.distil(model, judge.x[:500], epochs=1, samples=1, progress=False)
        found["costs"] = costs(model, fast, net, judge.test.x)
    return found


def ensemble(task: Task, kind: str, seed: int) -> dict[str, Any]:
    """Four models as one, and their students; an ensemble of plain networks has a temperature of held-out labels."""
    judge = Judge(task, seed)
    models = [trained(task, kind, seed + 1000 * member) for member in range(MEMBERS)]
    model: Any = ibnn.Ensemble([model for model, _ in models])
    if kind == "plain":
        model.likelihood.set_temperature(find_temperature(model, judge.valid))
    found: dict[str, Any] = {"training seconds": round(sum(seconds for _, seconds in models), 1)}
    found["ensemble"] = judge(model, 2 if kind == "iBNN" else 5, refer=True)
    found["one pass, whole"] = distilled(model, judge, seed)
    found["one pass, head"] = distilled(model, judge, seed, whole=False)
    return found


CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "no copies": {"copies": 0},
    "4 copies": {"copies": 4},
    "width 256": {"hidden": 256},
    "80 epochs": {"epochs": 80},
    "lr 1e-3": {"lr": 1e-3},
    "1 sample": {"samples": 1},
    "whole": {"whole": True},
    "whole, lr 2e-3": {"whole": True, "lr": 2e-3},
}


def choice(task: Task, seed: int) -> dict[str, Any]:
    """Agreement with the draws on held-out inputs, by options of `distil`; the test set has no part."""
    train, valid, _ = task.data(seed)
    model, _ = trained(task, "iBNN", seed)
    x, found = torch.cat([train.x, valid.x]), {}
    for name, options in CHOICES.items():
        fast = ibnn.distil(model, x, seed=seed, progress=False, **options)
        found[name] = next(iter(fast.report.values()))._asdict()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--kinds", nargs="+", default=["iBNN", "dropout", "4 iBNN", "4 plain"])
    parser.add_argument("--choose", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("one_pass", str(__doc__))
    for seed in chosen.seeds:
        for name in chosen.tasks:
            task = TASKS[name]
            if chosen.choose:
                results.run(f"choice / {name} / seed {seed}", lambda task=task, seed=seed: choice(task, seed))  # type: ignore[misc]
                continue
            for kind in chosen.kinds:
                work = ensemble if kind.startswith("4 ") else single
                own = kind.removeprefix("4 ")
                results.run(f"{name} / {kind} / seed {seed}", lambda w=work, t=task, k=own, s=seed: w(t, k, s))  # type: ignore[misc]
