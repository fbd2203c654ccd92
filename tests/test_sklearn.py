import pickle
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.datasets import make_blobs, make_moons
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import parametrize_with_checks

from ibnn.sklearn import IBNNClassifier, IBNNRegressor, Uncertainty

QUICK: dict[str, Any] = {
    "hidden": (16,),
    "components": 2,
    "prior_std": 0.3,
    "samples": 2,
    "lr": 0.03,
    "weight_decay": 0.1,
    "random_state": 0,
}
CHOSEN = QUICK | {"prior_std": "auto"}
X, LABELS = make_moons(120, noise=0.2, random_state=0)
NAMES = np.array(["no", "yes"])[LABELS]
Y = np.stack([3 * X[:, 0] + 50, 1000 * X[:, 1]], 1)  # targets of quite different size

EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": "every row of a step has a draw of the noise of its own, so a row"
    " twice is not, bit for bit, a row of weight 2; scikit-learn expects the same of its own SGD and MLP estimators."
    " The loss is the same, and weight 0 is exact: below."
}


@parametrize_with_checks(
    [IBNNClassifier(epochs=8, **QUICK), IBNNRegressor(epochs=8, **QUICK)], expected_failed_checks=lambda _: EXPECTED
)
def test_scikit_learn_s_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [
        IBNNClassifier(epochs=20, class_weight="balanced", **CHOSEN),
        IBNNRegressor(epochs=40, **CHOSEN),
    ],
    expected_failed_checks=lambda _: EXPECTED,
)
def test_scikit_learn_s_own_checks_of_other_settings(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(scope="module")
def classifier() -> IBNNClassifier:
    return IBNNClassifier(epochs=20, **QUICK).fit(X, NAMES)


@pytest.fixture(scope="module")
def regressor() -> IBNNRegressor:
    return IBNNRegressor(epochs=40, **QUICK).fit(X, Y)


# -------------------------------------------------------------------------------------------------- what is reproduced


def test_the_same_random_state_gives_the_same_bits(classifier: IBNNClassifier) -> None:
    before = torch.get_rng_state()
    again = clone(classifier).fit(X, NAMES)
    assert np.array_equal(again.predict_proba(X), classifier.predict_proba(X))
    assert torch.equal(before, torch.get_rng_state())
    drawn = [clone(classifier).set_params(random_state=np.random.RandomState(3)).fit(X, NAMES) for _ in range(2)]
    assert np.array_equal(*(model.predict_proba(X) for model in drawn))
    other = clone(classifier).set_params(random_state=None).fit(X, NAMES)
    assert not np.allclose(other.predict_proba(X), classifier.predict_proba(X))


def test_pickles_answer_with_the_same_bits(
    classifier: IBNNClassifier, regressor: IBNNRegressor, tmp_path: Path
) -> None:
    for model in (classifier, regressor):
        joblib.dump(model, tmp_path / "model")
        for again in (pickle.loads(pickle.dumps(model)), joblib.load(tmp_path / "model")):
            assert np.array_equal(again.predict_uncertainty(X).total, model.predict_uncertainty(X).total)
            assert np.array_equal(again.predict(X), model.predict(X))


def test_weight_zero_is_absence_and_weight_one_is_no_weight(classifier: IBNNClassifier) -> None:
    ones = clone(classifier).fit(X, NAMES, sample_weight=np.ones(len(X)))
    assert np.array_equal(ones.predict_proba(X), classifier.predict_proba(X))
    extra = np.full((5, 2), 100.0)  # would spoil even the standardisation
    padded, weight = np.concatenate([X, extra]), np.repeat([1.0, 0.0], [len(X), 5])
    absent = clone(classifier).fit(padded, np.concatenate([NAMES, NAMES[:5]]), sample_weight=weight)
    assert np.array_equal(absent.predict_proba(X), classifier.predict_proba(X))
    names = np.concatenate([NAMES, ["yes"] * 4, ["maybe"]])  # neither frequent nor known
    balanced = IBNNClassifier(epochs=2, class_weight="balanced", **QUICK)
    absent = clone(balanced).fit(padded, names, sample_weight=weight)
    assert absent.classes_.tolist() == ["no", "yes"]
    assert np.array_equal(absent.predict_proba(X), balanced.fit(X, NAMES).predict_proba(X))


def test_weights_move_the_answer_as_repetitions_do() -> None:
    """One input, three answers yes and one no: weight 3 on the no makes it even, as three of it would."""
    x, y, weight = np.zeros((40, 1)), np.arange(40) % 4 > 0, np.where(np.arange(40) % 4 > 0, 1.0, 3.0)
    model = IBNNClassifier(epochs=60, **QUICK)
    for options, odds in (({}, 0.75), ({"sample_weight": weight}, 0.5)):
        assert model.fit(x, y, **options).predict_proba(x[:1])[0, 1] == pytest.approx(odds, abs=0.02)
    balanced = model.set_params(class_weight="balanced").fit(x, y)
    assert balanced.predict_proba(x[:1])[0, 1] == pytest.approx(0.5, abs=0.02)


def test_weighted_regression_finds_the_weighted_mean() -> None:
    x, y = np.zeros((40, 1)), np.arange(40) % 4 / 4
    model = IBNNRegressor(epochs=100, **QUICK).fit(x, y, sample_weight=1 + 4 * y)
    mean, std = model.predict(x[:1], return_std=True)
    expected = np.average(y, weights=1 + 4 * y)
    assert mean[0] == pytest.approx(expected, abs=0.02)
    assert std[0] == pytest.approx(np.sqrt(np.average((y - expected) ** 2, weights=1 + 4 * y)), rel=0.05)


# ----------------------------------------------------------------------------------------------------------- answers


def test_labels_of_any_kind_and_probabilities(classifier: IBNNClassifier) -> None:
    probs = classifier.predict_proba(X)
    assert classifier.classes_.tolist() == ["no", "yes"]
    assert np.array_equal(classifier.predict(X), classifier.classes_[probs.argmax(1)])
    assert np.allclose(np.exp(classifier.predict_log_proba(X)), probs)
    assert classifier.score(X, NAMES) > 0.85


def test_columns_of_probabilities_are_in_the_order_of_the_sorted_labels() -> None:
    x, y = make_blobs(60, centers=[[0, 0], [9, 0], [0, 9]], random_state=0)
    names = np.array(["tram", "bus", "foot"])[y]
    model = IBNNClassifier(epochs=20, **QUICK).fit(x, names)
    probs = model.predict_proba([[0, 0], [9, 0], [0, 9]])
    assert model.classes_.tolist() == ["bus", "foot", "tram"]
    assert probs.argmax(1).tolist() == [2, 0, 1]
    assert np.allclose(probs.sum(1), 1)


def test_a_single_class_is_certain() -> None:
    model = IBNNClassifier(epochs=1, **QUICK).fit(X, ["yes"] * len(X))
    assert np.array_equal(model.predict_proba(X[:3]), np.ones((3, 1)))
    assert model.predict(X[:3]).tolist() == ["yes"] * 3
    assert not model.predict_uncertainty(X[:3]).total.any()
    assert pickle.loads(pickle.dumps(model)).predict(X[:1]).tolist() == ["yes"]


def test_uncertainty_adds_up(classifier: IBNNClassifier, regressor: IBNNRegressor) -> None:
    for model in (classifier, regressor):
        total, aleatoric, epistemic = model.predict_uncertainty(X)
        assert isinstance(model.predict_uncertainty(X[:1]), Uncertainty)
        assert np.allclose(total, aleatoric + epistemic)
        assert (aleatoric > 0).all()
        assert (epistemic >= 0).all()
    probs = classifier.predict_proba(X)
    assert np.allclose(classifier.predict_uncertainty(X).total, -(probs * np.log(probs)).sum(1))
    assert np.allclose(regressor.predict_uncertainty(X).total, regressor.predict(X, return_std=True)[1] ** 2)


def test_targets_are_in_their_own_units(regressor: IBNNRegressor) -> None:
    """An affine change of the targets changes the answers likewise."""
    scale, offset = np.array([0.01, 7.0]), np.array([-3.0, 1e3])
    other = clone(regressor).fit(X, Y * scale + offset)
    mean, std = regressor.predict(X, return_std=True)
    other_mean, other_std = other.predict(X, return_std=True)
    assert np.allclose(other_mean, mean * scale + offset, rtol=1e-5)
    assert np.allclose(other_std, std * scale, rtol=1e-5)
    answer, other_answer = regressor.predict_distribution(X), other.predict_distribution(X)
    density = other_answer.log_prob(torch.tensor(Y * scale + offset)) + torch.tensor(np.log(scale))
    assert torch.allclose(answer.log_prob(torch.tensor(Y)), density, atol=1e-4)
    assert regressor.score(X, Y) > 0.9


def test_intervals_hold_their_share_of_the_mixture(regressor: IBNNRegressor) -> None:
    low, high = regressor.predict_interval(X, level=0.8)
    answer = regressor.predict_distribution(X)
    normal = torch.distributions.Normal(answer.draw_means, answer.draw_stds)
    share = (normal.cdf(torch.tensor(high)) - normal.cdf(torch.tensor(low))).mean(0)
    assert torch.allclose(share, torch.full_like(share, 0.8), atol=1e-6)


def test_intervals_cover_fresh_rows() -> None:
    """90 % of 400 fresh rows within four standard errors, less what the fit takes from the noise it sees (2 %)."""
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (800, 2))
    y = x @ [3.0, -1.0] + 0.5 * random.normal(size=800)
    model = IBNNRegressor(**QUICK | {"epochs": 30, "prior_std": 0.1}).fit(x[:400], y[:400])
    low, high = model.predict_interval(x[400:], level=0.9)
    covered = ((low < y[400:]) & (y[400:] < high)).mean()
    assert 0.88 - 4 * np.sqrt(0.09 / 400) < covered < 0.9 + 4 * np.sqrt(0.09 / 400)
    assert model.predict(x[400:], return_std=True)[1].mean() == pytest.approx(0.5, rel=0.2)


def line(rows: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 3))
    return x, 50 + 10 * (x @ [3.0, -1.0, 0.5] + random.standard_t(3, size=rows))


@pytest.mark.parametrize("weight", [None, "weighted"])
def test_held_out_rows_give_novelty_and_conformal_intervals(weight: Any) -> None:
    x, y = line(1200)
    known, held, new = slice(0, 300), slice(300, 600), slice(600, 1200)
    weights = None if weight is None else np.linspace(0.5, 1.5, 300)
    model = IBNNRegressor(epochs=10, **QUICK).fit(x[known], y[known], weights, X_val=x[held], y_val=y[held])
    low, high = model.predict_interval(x[new], 0.9, conformal=True)
    covered = ((low <= y[new]) & (y[new] <= high)).mean()
    assert abs(covered - 0.9) < 4 * np.sqrt(0.09 / 300 + 0.09 / 600)
    p = model.p_value(x[new])
    assert (p.shape, p.dtype) == ((600,), np.float64)
    for level in (0.05, 0.2):
        assert abs((p <= level).mean() - level) < 4 * np.sqrt(level * (1 - level) * (1 / 300 + 1 / 600))
    assert (model.p_value(100 * x[new]) == pytest.approx(1 / 301)) is True
    np.testing.assert_allclose(model.p_value(x[new][:1]), p[:1])


def test_conformal_intervals_follow_the_noise_that_is_set_in_the_end() -> None:
    """What held-out rows showed is in units of the final standard deviation, not of the one before its correction."""
    x, y = line(400)
    model = IBNNRegressor(epochs=5, **CHOSEN).fit(x[:200], y[:200], X_val=x[200:], y_val=y[200:])
    mean, std = model.predict(x[200:], return_std=True)
    limit = np.sort(np.abs(y[200:] - mean) / std)[180]  # ⌈0.9 · 201⌉ = 181 of 200
    reach = model.predict_interval(x[200:], 0.9, conformal=True)[1] - mean
    np.testing.assert_allclose(reach / std, limit, rtol=1e-3)


def test_conformal_scores_have_the_draws_of_predictions() -> None:
    x, y = line(260)
    model = IBNNRegressor(epochs=5, **QUICK | {"prior_std": 1.0, "samples": 1, "components": 1})
    mean, std = model.fit(x[:200], y[:200], X_val=x[200:], y_val=y[200:]).predict(x[200:], return_std=True)
    found = np.sort(model.model_.held_out.distances0[:, 0, 0, 0].numpy())
    np.testing.assert_allclose(np.median(found), np.median(np.abs(y[200:] - mean) / std), rtol=1e-4)


def test_sets_cover_the_true_class() -> None:
    x, labels = make_moons(900, noise=0.4, random_state=0)
    names = np.array(["no", "yes"])[labels]
    model = IBNNClassifier(epochs=10, **QUICK).fit(x[:200], names[:200], X_val=x[200:500], y_val=names[200:500])
    sets = model.predict_set(x[500:], level=0.9)
    assert (sets.shape, sets.dtype) == ((400, 2), bool)
    assert sets[np.arange(400), labels[500:]].mean() > 0.9 - 4 * np.sqrt(0.09 / 300 + 0.09 / 400)
    assert 1 <= sets.sum(1).mean() < 1.9
    by_class = np.asarray(model.predict_distribution(x[500:]).set(0.9, by_class=True))
    assert by_class[np.arange(400), labels[500:]].mean() > 0.8


def test_pickles_keep_p_values() -> None:
    x, labels = make_moons(600, noise=0.2, random_state=0)
    model = IBNNClassifier(epochs=10, **QUICK).fit(x[60:], labels[60:], X_val=x[:60], y_val=labels[:60])
    assert model.p_value([[50.0, 50.0]]) == pytest.approx(1 / 61)
    assert np.array_equal(pickle.loads(pickle.dumps(model)).p_value(x[:9]), model.p_value(x[:9]))


def test_too_few_held_out_rows_are_refused(classifier: IBNNClassifier, regressor: IBNNRegressor) -> None:
    few = IBNNClassifier(epochs=2, **QUICK).fit(X, NAMES, X_val=X[:49], y_val=NAMES[:49])
    for ask in (few.p_value, few.predict_set, classifier.p_value, classifier.predict_set, regressor.p_value):
        with pytest.raises(ValueError, match=r"at least 50 rows.*X_val"):
            ask(X)
    with pytest.raises(ValueError, match="has 49"):
        few.p_value(X)
    with pytest.raises(ValueError, match=r"conformal.*X_val"):
        regressor.predict_interval(X, conformal=True)


def test_one_target_has_one_axis() -> None:
    model = IBNNRegressor(epochs=2, **QUICK).fit(X, Y[:, 0])
    answers = [model.predict(X), *model.predict(X, return_std=True), *model.predict_interval(X)]
    assert {answer.shape for answer in [*answers, *model.predict_uncertainty(X)]} == {(len(X),)}
    assert IBNNRegressor(epochs=2, **QUICK).fit(X, Y[:, :1]).predict(X).shape == (len(X), 1)


# ---------------------------------------------------------------------------------------------------------- training


def test_training_stops_when_held_out_rows_stop_improving() -> None:
    noise = np.random.default_rng(0).integers(2, size=len(X))  # nothing to learn
    model = IBNNClassifier(epochs=5000, **QUICK).fit(X, noise)
    steps = [row["step"] for row in model.history_]
    assert steps[-1] < 1000
    assert model.history_[-1]["lr"] < QUICK["lr"]


def test_the_weights_are_those_of_the_best_check() -> None:
    model = IBNNRegressor(epochs=200, **QUICK | {"components": 4}).fit(X, Y[:, 0] ** 2)
    longer = clone(model).set_params(epochs=1000).fit(X, Y[:, 0] ** 2)
    assert min(row["held_out_loss"] for row in longer.history_) <= min(row["held_out_loss"] for row in model.history_)


@pytest.mark.parametrize(
    "weight", [None, pytest.param(np.where(LABELS, 1.0, 2.0), marks=pytest.mark.slow)], ids=["", "weighted"]
)
def test_the_noise_is_chosen_by_held_out_rows(weight: Any) -> None:
    """A network that learns labels of no meaning by heart wants the strong noise, an exact parabola none."""
    random = np.random.default_rng(0)
    x, noise = random.normal(size=(len(X), 10)), random.integers(2, size=len(X))
    model = IBNNClassifier(**CHOSEN | {"lr": 0.1}).fit(x, noise, sample_weight=weight)
    assert model.model_.prior_std == 0.6
    curve = IBNNRegressor(**CHOSEN).fit(X, X[:, 0] ** 2, sample_weight=weight)
    assert curve.model_.prior_std == 0.001
    assert IBNNRegressor(epochs=1, **QUICK).fit(X, Y).model_.prior_std == 0.3


def test_too_few_rows_choose_nothing() -> None:
    assert IBNNClassifier(epochs=1, random_state=0).fit(X[:15], NAMES[:15]).model_.prior_std == 0.6
    model = IBNNRegressor(epochs=1, random_state=0).fit(X[:15], Y[:15])
    assert model.model_.prior_std == 0.25
    assert model.history_ == []
    assert (model.predict_uncertainty(X).total > 0).all()


def test_a_class_of_one_row_can_be_held_out() -> None:
    names = np.where(np.arange(len(X)) == 7, "maybe", NAMES)
    model = IBNNClassifier(epochs=1, **CHOSEN).fit(X, names)
    assert model.predict_proba(X).shape == (len(X), 3)


def test_which_layers_have_noise() -> None:
    model = IBNNClassifier(**QUICK | {"hidden": (8, 8), "epochs": 1}).fit(X, NAMES)  # two columns get none
    assert list(model.model_.latents) == ["body.2", "body.4"]
    assert list(IBNNClassifier(**QUICK | {"hidden": (), "epochs": 1}).fit(X, NAMES).model_.latents) == ["body.0"]
    wide = IBNNClassifier(**QUICK | {"epochs": 1}).fit(np.repeat(X, 4, axis=1), NAMES)
    assert list(wide.model_.latents) == ["body.0", "body.2"]


# ----------------------------------------------------------------------------------------------------------- company


def test_data_frames_keep_their_names() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["east", "north"])
    model = IBNNClassifier(epochs=1, **QUICK).fit(frame, pandas.Series(NAMES))
    assert model.feature_names_in_.tolist() == ["east", "north"]
    bare = IBNNClassifier(epochs=1, **QUICK).fit(X, NAMES)
    assert np.array_equal(model.predict_proba(frame), bare.predict_proba(X))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["north", "east"]])
    targets = pandas.DataFrame(Y, columns=["a", "b"])
    assert IBNNRegressor(epochs=1, **QUICK).fit(frame, targets).predict(frame).shape == Y.shape
    assert IBNNRegressor(epochs=1, **QUICK).fit(frame, targets["a"]).predict(frame).shape == (len(X),)


def test_searches_and_pipelines() -> None:
    pipeline = make_pipeline(PolynomialFeatures(2), IBNNClassifier(**QUICK))  # its first column is constant
    grid = {"ibnnclassifier__epochs": np.array([1, 10])}
    search = GridSearchCV(pipeline, grid, cv=2, scoring="neg_log_loss").fit(X, NAMES)
    assert search.best_params_ == {"ibnnclassifier__epochs": 10}
    assert np.isfinite(search.predict_proba(X)).all()
    draws = GridSearchCV(IBNNClassifier(epochs=1, **QUICK), {"samples": np.array([2])}, cv=2, error_score="raise")
    assert draws.fit(X, NAMES).best_params_ == {"samples": 2}
    found = GridSearchCV(IBNNRegressor(epochs=10, **QUICK), {"prior_std": [0.1, 1.5]}, cv=2).fit(X, Y[:, 0])
    assert found.best_params_ == {"prior_std": 0.1}


def test_what_cannot_be_used_is_refused() -> None:
    for model, y in ((IBNNClassifier(), NAMES), (IBNNRegressor(), Y)):
        with pytest.raises(TypeError, match=r"[Ss]parse"):
            model.fit(csr_array(X), y)
    for wrong in ({"prior_std": "strong"}, {"prior_std": -1.0}, {"components": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            IBNNClassifier(**wrong).fit(X, NAMES)
    model = IBNNClassifier(epochs=1, **QUICK).fit(X, NAMES)
    for unseen in ("yes, please", "nothing"):  # the beginning of the first is known
        with pytest.raises(ValueError, match=rf"`y` to be .* unseen, but got \['{unseen}'\]"):
            model.fit(X, NAMES, X_val=X, y_val=np.where(LABELS, unseen, "no"))
    with pytest.raises(ValueError, match="1d array"):
        IBNNClassifier().fit(X, np.stack([LABELS, 1 - LABELS], 1))  # several labels a row
    with pytest.raises(ValueError, match="weight"):
        IBNNRegressor().fit(X, Y, sample_weight=np.zeros(len(X)))
    with pytest.raises(ValueError, match=r"[Ww]eight"):
        IBNNClassifier(class_weight={"no": 0, "yes": 0}).fit(X, NAMES)
    with pytest.raises(ValueError, match=r"[Nn]egative"):
        IBNNRegressor().fit(X, Y, sample_weight=-np.ones(len(X)))
