"""Estimators that answer in one pass of one network."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_iris
from sklearn.model_selection import train_test_split
from sklearn.utils.estimator_checks import parametrize_with_checks
from test_sklearn import EXPECTED, QUICK

import ibnn
from ibnn.one_pass import OnePass
from ibnn.sklearn import IBNNClassifier, IBNNRegressor, table

CASES = {"classes": (IBNNClassifier, load_iris), "numbers": (IBNNRegressor, load_diabetes)}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "TAUGHT_STEPS", 100)


@pytest.mark.slow
@parametrize_with_checks(
    [IBNNClassifier(epochs=8, one_pass=True, **QUICK), IBNNRegressor(epochs=8, one_pass=True, **QUICK)],
    expected_failed_checks=lambda _: EXPECTED,
)
def test_scikit_learn_s_own_checks(estimator: Any, check: Any, quick: None) -> None:
    check(estimator)


def nll(model: Any, x: Any, y: Any) -> torch.Tensor:
    answer, target = model.predict_distribution(x), torch.tensor(y)
    if isinstance(model, IBNNRegressor):
        return -answer.log_prob(target[:, None]).mean()
    return -answer.log_probs[torch.arange(len(y)), target].mean()


@pytest.mark.parametrize("case", CASES)
def test_one_pass_is_the_student_of_distil_and_close_to_the_draws(case: str) -> None:
    kind, load = CASES[case]
    x, new, y, target = train_test_split(*load(return_X_y=True), test_size=0.3, random_state=0)
    draws, fast = (
        kind((16,), components=4, epochs=30, random_state=0, one_pass=one_pass).fit(x, y) for one_pass in (False, True)
    )
    assert isinstance(fast.model_, OnePass)
    assert abs(nll(fast, new, target) - nll(draws, new, target)) < 0.05  # nats; both are noisy answers of one ensemble
    spread = [model.predict_uncertainty(new).epistemic for model in (draws, fast)]
    assert np.corrcoef(np.argsort(np.argsort(spread, 1), 1))[0, 1] > 0.5
    rows = draws._tensor(x).float()
    rows = rows.repeat(-(-100 // len(rows)), 1)
    epochs = -(-table.TAUGHT_STEPS * 256 // ((1 + table.COPIES) * len(rows)))
    taught: Any = {"whole": True, "epochs": epochs, "copies": table.COPIES, "lr": table.TAUGHT_LR, "seed": draws._seed}
    samples = draws._samples()
    by_hand = ibnn.distil(copy.deepcopy(draws.model_).float(), rows, samples=samples, progress=False, **taught)
    expected, found = (model.double().predict(draws._tensor(new)) for model in (by_hand, fast.model_))
    torch.testing.assert_close(found.total, expected.total, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.epistemic, expected.epistemic, rtol=1e-2, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_pass_answers_whatever_the_ensemble_does(case: str, quick: None, tmp_path: Path) -> None:
    kind, load = CASES[case]
    x, y = load(return_X_y=True)
    known, held, y_known, y_held = train_test_split(x, y, test_size=0.4, random_state=0)
    model = kind(epochs=8, one_pass=True, **QUICK).fit(known, y_known, X_val=held, y_val=y_held)
    assert model.p_value(x[:3]).min() > 0 == (model.p_value(100 + x[:3]) > 0.05).sum()
    total, aleatoric, epistemic = model.predict_uncertainty(x)
    np.testing.assert_allclose(total, aleatoric + epistemic)
    if case == "classes":
        assert model.predict_set(x, 0.9).shape == (150, 3)
        np.testing.assert_allclose(model.predict_proba(x).sum(1), 1)
    else:
        mean, std = model.predict(x, return_std=True)
        np.testing.assert_allclose(std**2, total)
        for conformal in (False, True):
            low, high = model.predict_interval(x, conformal=conformal)
            assert ((low < mean) & (mean < high)).all()
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.predict(x), model.predict(x))
    rows = model._tensor(x[:4])
    written = ibnn.export(model.model_, rows, tmp_path / "one.pt2", format="torch")
    exported, answer = torch.export.load(written.path).module()(rows), model.model_.predict(rows)
    torch.testing.assert_close(exported["epistemic"], answer.epistemic, check_dtype=False, rtol=1e-4, atol=1e-5)


def test_one_class_and_few_rows_can_be_answered_in_one_pass(quick: None) -> None:
    x = np.random.RandomState(0).randn(12, 3)
    assert IBNNClassifier(epochs=2, one_pass=True, **QUICK).fit(x, ["a"] * 12).predict(x).tolist() == ["a"] * 12
    model = IBNNRegressor(epochs=2, one_pass=True, **QUICK).fit(x, np.stack([x[:, 0], 9 * x[:, 1]], 1))
    assert model.predict(x).shape == (12, 2)
    assert isinstance(model.model_, OnePass)
