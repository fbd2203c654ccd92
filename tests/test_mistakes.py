"""Mistakes that newcomers made, as a table: what was called, and the error that names the argument and the way out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ibnn
from ibnn import nets

X, Y = torch.randn(120, 4, generator=torch.Generator().manual_seed(0)), torch.arange(120) % 3


def model(**options: Any) -> ibnn.IBNN:
    torch.manual_seed(0)
    return ibnn.convert(nets.mlp(4, 3, hidden=8), components=2, seed=0, **options)


def train(y: Any = Y, **options: Any) -> Any:
    return ibnn.fit(model(**options), (X, y), steps=2, quiet=True)


def calibrated() -> ibnn.IBNN:
    own = model()
    ibnn.calibrate(own, (X, Y), progress=False)
    return own


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "predict: words": (lambda: model().predict("hello"), ValueError, "torch.tensor"),
    "predict: nothing": (lambda: model().predict(None), ValueError, "`x`"),
    "predict: a list of rows": (lambda: model().predict([[1.0, 2.0, 3.0, 4.0]]), ValueError, "torch.tensor"),
    "predict: a row without a batch": (lambda: model().predict(X[0]), ValueError, r"x\[None\]"),
    "predict: too wide": (lambda: model().predict(torch.zeros(2, 5)), ValueError, r"\(rows, 4\)"),
    "predict: NaN": (lambda: model().predict(X / 0 * 0), ValueError, "NaN"),
    "predict: samples=0": (lambda: model().predict(X, samples=0), ValueError, "`samples`"),
    "predict: seed=-1": (lambda: model().predict(X, seed=-1), ValueError, "`seed`"),
    "predict: a plain network": (lambda: ibnn.predict(nets.mlp(4, 3), X), TypeError, "ibnn.convert"),  # type: ignore[arg-type]
    "predict: DataParallel": (lambda: ibnn.predict(nn.DataParallel(model()), X), TypeError, "model.module"),  # type: ignore[arg-type]
    "predict: fallback without reference": (lambda: model().predict(X, fallback=0.01), ValueError, "fit_novelty"),
    "predict: an option that is not there": (lambda: model().predict(X, sample=3), TypeError, "sample"),  # type: ignore[call-arg]
    "convert: not a network": (lambda: ibnn.convert("net"), TypeError, "`net`"),  # type: ignore[arg-type]
    "convert: DataParallel": (lambda: ibnn.convert(nn.DataParallel(nets.mlp(4, 3))), TypeError, "net.module"),
    "convert: twice": (lambda: ibnn.convert(model().net), ValueError, "revert"),
    "convert: nothing to convert": (lambda: ibnn.convert(nn.ReLU()), ValueError, "layer"),
    "convert: components=0": (lambda: ibnn.convert(nets.mlp(4, 3), components=0), ValueError, "`components`"),
    "convert: a likelihood that is not there": (lambda: model(likelihood="gausian"), ValueError, "gaussian"),
    "fit: floats as classes": (lambda: train(Y.float()), TypeError, "gaussian"),
    "fit: one-hot rows": (lambda: train(nn.functional.one_hot(Y)), ValueError, "argmax"),
    "fit: a label too many": (lambda: train(Y + 1), ValueError, r"0 … 2"),
    "fit: labels of other rows": (lambda: train(Y[:100]), ValueError, "equal length"),
    "fit: words as classes": (lambda: train(["a"] * 120), TypeError, "numbered from 0"),
    "fit: two weights": (lambda: train(likelihood=ibnn.Categorical(weight=torch.ones(2))), ValueError, "`weight`"),
    "fit: inputs alone": (lambda: ibnn.fit(model(), X), TypeError, r"\(x, y\)"),  # type: ignore[arg-type]
    "fit: a plain network": (lambda: ibnn.fit(nets.mlp(4, 3), (X, Y)), TypeError, "convert"),  # type: ignore[arg-type]
    "fit: trackers that are not installed": (
        lambda: ibnn.fit(model(), (X, Y), trackers=("wandb",), run_dir="r", quiet=True), ValueError, "install wandb",
    ),
    "fit: lr=-1": (lambda: ibnn.fit(model(), (X, Y), lr=-1.0, quiet=True), ValueError, "`lr`"),
    "calibrate: a plain network": (lambda: ibnn.calibrate(nets.mlp(4, 3), (X, Y)), TypeError, "convert"),  # type: ignore[arg-type]
    "calibrate: an ensemble": (
        lambda: ibnn.calibrate(ibnn.Ensemble([nets.mlp(4, 3), nets.mlp(4, 3)]), (X, Y)), TypeError, "scale_temperature",  # type: ignore[arg-type]
    ),
    "diagnose: an ensemble": (
        lambda: ibnn.diagnose(ibnn.Ensemble([nets.mlp(4, 3), nets.mlp(4, 3)])), TypeError, "members",  # type: ignore[arg-type]
    ),
    "calibrate: inputs alone": (lambda: ibnn.calibrate(model(), X), TypeError, r"\(x, y\)"),
    "abstain: ten labels": (lambda: ibnn.abstain(model().predict(X[:10]), Y[:10]), ValueError, "59"),
    "abstain: labels out of range": (lambda: ibnn.abstain(model().predict(X), Y + 1), ValueError, "`target`"),
    "set: a level of 90": (lambda: calibrated().predict(X).set(90), ValueError, "`level`"),
    "novel: a level that cannot be reached": (lambda: calibrated().predict(X).novel(1e-4), ValueError, "0.0"),
    "distil: few inputs": (lambda: ibnn.distil(model(), X[:50]), ValueError, "100"),
    "distil: a plain network": (lambda: ibnn.distil(nets.mlp(4, 3), X), TypeError, "`model`"),
    "load: no folder": (lambda: ibnn.load("nowhere", nets.mlp(4, 3)), FileNotFoundError, "nowhere"),
    "model.fit": (lambda: model().fit, AttributeError, r"ibnn\.fit"),
    "model.save": (lambda: model().save, AttributeError, "save_pretrained"),
    "model.diagnose": (lambda: model().diagnose, AttributeError, r"ibnn\.diagnose"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_with_a_way_out(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, error, words = MISTAKES[name]
    with pytest.raises(error, match=words):
        call()
    assert not list(tmp_path.iterdir())  # before anything is touched


def test_predict_takes_tables_and_datasets() -> None:
    pandas = pytest.importorskip("pandas")
    own = model()
    expected = own.predict(X).probs
    table = pandas.DataFrame(X.numpy(), columns=list("abcd"))
    for given in (table, TensorDataset(X), TensorDataset(X, Y), X.numpy()):
        torch.testing.assert_close(own.predict(given, progress=False).probs, expected)


def test_what_is_printed_says_what_matters() -> None:
    own = calibrated()
    own.likelihood.set_temperature(2.5)
    assert "temperature=2.5" in str(own)
    cost = ibnn.cost(nets.mlp(4, 3, hidden=8), X, components=2)
    assert "10 passes" in str(cost)
    assert "× plain" in str(cost)
    p = ibnn.Categorical().summarise((6.0 * nn.functional.one_hot(Y, 3).float())[None, None])
    assert "100.0% of the labelled answers" in str(ibnn.abstain(p, Y))
    noise: Tensor = torch.randn(1, 1, 120, 3, generator=torch.Generator().manual_seed(1))
    assert "withholds every answer" in str(ibnn.abstain(ibnn.Categorical().summarise(noise), Y))
