"""Ensembles of tables: members side by side, their training on folds, the noise of targets, mixed tables."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from torch import nn

import ibnn
from ibnn.layers.registry import layer_type
from ibnn.likelihood import Categorical
from ibnn.sklearn import IBNNClassifier, IBNNRegressor
from ibnn.sklearn.ensemble import CategoricalMembers, Ensemble, GaussianMembers, StackedLinear, squash, stacked
from ibnn.sklearn.noise import fit_noise, student_scales, tails
from ibnn.sklearn.training import Pace, Rows, Run, folds, train

PACE = Pace(lr=0.01, weight_decay=0.0, batch_size=16, steps=60, seed=0)


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean(-1)


def table(rows: int = 96, members: int = 3) -> Rows:
    torch.manual_seed(1)
    x = torch.randn(rows, 3)
    fold = torch.tensor(folds(rows, members, None, 0))
    return Rows(x, torch.sin(x[:, :1]) + 0.1 * torch.randn(rows, 1), torch.ones(rows), fold)


def net(members: int = 3, outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return stacked(members, [3, 8, outputs], nn.SiLU)


# ----------------------------------------------------------------------------------------------------------- members


def test_members_are_networks_of_their_own() -> None:
    body, x = net(outputs=2), torch.randn(5, 3)
    found = Ensemble(body, 3)(x)
    for member in range(3):
        h = squash(x)
        for layer in body:
            h = h @ layer.weight[member] + layer.bias[member] if isinstance(layer, StackedLinear) else layer(h)
        torch.testing.assert_close(found[:, member], h)


def test_noise_multiplies_the_inputs_of_all_members() -> None:
    body, x = net(), torch.randn(5, 3)
    model = ibnn.convert(body, components=1, prior_std=0.3, likelihood=GaussianMembers(), copy=True)
    z = 1 + 0.3 * torch.randn(2, 11)
    for draw, found in zip(z, model.outputs(x[:, None].expand(-1, 3, -1), z), strict=True):
        first, activation, last = body
        inner = activation(first(x[:, None] * draw[:3] + torch.zeros(5, 3, 3)))
        torch.testing.assert_close(found, last(inner * draw[3:]))


def test_weights_of_a_stacked_layer_fold() -> None:
    layer = StackedLinear(2, 3, 4)
    x, z = torch.randn(6, 2, 3), torch.rand(3)
    expected = layer(x * z)
    layer.weight.data = layer_type(layer).fold(layer, z)["weight"].detach()
    torch.testing.assert_close(layer(x), expected)


def test_members_are_components_of_the_mixture() -> None:
    draws = torch.randn(1, 4, 5, 3, 6, dtype=torch.float64)  # (1, S, B, M, outputs)
    by_component = draws[0].movedim(2, 0)  # (M, S, B, outputs)
    found, expected = CategoricalMembers().summarise(draws), Categorical().summarise(by_component)
    for name in ("probs", "aleatoric", "between", "within"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    torch.testing.assert_close(CategoricalMembers().combine(draws[0]).exp(), expected.probs)
    labels = torch.randint(6, (5,))
    terms = CategoricalMembers().terms(draws[0, 0], labels)
    each = [Categorical().terms(draws[0, 0, :, member], labels).loss for member in range(3)]
    torch.testing.assert_close(terms.loss, torch.stack(each).mean())
    assert terms.count == 5


def test_the_spread_of_members_is_taken_off_the_noise() -> None:
    """With errors of members e_m = e + d_m, the mixture's variance is that of the mean's error, E[e²]."""
    members, rows = 400, 300
    generator = torch.Generator().manual_seed(0)
    likelihood = GaussianMembers().double()
    likelihood.log_std.data.fill_(0.5 * math.log(1.0 + 0.2))  # var(e) + var(d), as measured on held-out rows
    draws = math.sqrt(0.2) * torch.randn(1, 1, rows, members, 1, generator=generator, dtype=torch.float64)
    answer = likelihood.summarise(draws)
    torch.testing.assert_close(answer.variance.mean(), torch.tensor(1.0).double(), rtol=0.01, atol=0)
    likelihood.scales = torch.tensor([0.5, 1.5], dtype=torch.float64)
    mixed = likelihood.summarise(draws)
    torch.testing.assert_close(mixed.aleatoric, answer.aleatoric * (0.5**2 + 1.5**2) / 2)
    assert len(mixed.draw_means) == 2 * members


# ---------------------------------------------------------------------------------------------------------- training


def test_a_member_never_sees_the_rows_it_holds_out() -> None:
    rows, first = table(), net()
    spoilt = rows._replace(y=torch.where(rows.fold[:, None] == 1, torch.tensor(1e3), rows.y))
    results = []
    for each in (rows, spoilt):
        run = Run(net(), 3, each, squares, PACE._replace(steps=10))
        run.advance(10)
        results.append([p.detach().clone() for p in run.parameters])
    for clean, other, start in zip(*results, first.parameters(), strict=True):
        assert torch.equal(clean[1], other[1])
        assert not torch.equal(clean[0], other[0])
        assert not torch.equal(clean[1], start[1])


def test_held_out_answers_are_those_of_the_member_that_holds_a_row_out() -> None:
    rows = table(95)  # folds of unequal size
    run = Run(net(), 3, rows, squares, PACE)
    all_members = run.net(rows.x[:, None].expand(-1, 3, -1))
    torch.testing.assert_close(run.answers(), all_members[torch.arange(95), rows.fold])


def test_held_out_answers_with_noise_are_means_of_draws() -> None:
    rows = table(95)
    model = ibnn.convert(net(), components=1, prior_std=0.3, init_std=0.0, likelihood=GaussianMembers(), copy=False)
    run = Run(model.net, 3, rows, squares, PACE, noisy=model)
    every = model.outputs(rows.x[:, None].expand(-1, 3, -1), model.draw_latents(4, PACE.seed)).mean(0)
    torch.testing.assert_close(run.answers(), every[torch.arange(95), rows.fold])


def test_weights_are_repetitions_in_the_loss() -> None:
    rows = table(32, 2)._replace(fold=torch.full((32,), -1))
    times = torch.tensor([1, 3] * 16)
    copies = torch.arange(32).repeat_interleave(times)
    heavy = rows._replace(weight=times.float())
    repeated = Rows(rows.x[copies], rows.y[copies], torch.ones(64), torch.full((64,), -1))
    results = []
    for each in (heavy, repeated):  # one step of all rows
        run = Run(net(2), 2, each, squares, PACE._replace(batch_size=64, steps=1))
        run.advance(1)
        results.append(run.parameters)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_the_best_candidate_is_trained_to_its_end() -> None:
    rows = table()
    runs = [Run(net(), 3, rows, squares, PACE._replace(lr=lr, steps=300)) for lr in (1e-6, 0.01)]
    best = train(runs)
    assert best is runs[1]
    assert runs[0].step <= 200
    assert best.losses().mean().item() == pytest.approx(best.best, rel=1e-4)
    assert best.best < 0.1


def test_folds_are_stratified_where_classes_allow() -> None:
    labels = np.repeat([0, 1], [60, 20])
    found = folds(80, 4, labels, 0)
    assert [np.bincount(labels[found == fold]).tolist() for fold in range(4)] == [[15, 5]] * 4
    assert np.bincount(folds(80, 4, np.repeat([0, 1], [79, 1]), 0)).tolist() == [20] * 4


# ------------------------------------------------------------------------------------------------- noise of targets


def test_a_student_distribution_is_a_mixture_of_gaussians() -> None:
    x = np.linspace(-3, 3, 25)
    normal = torch.distributions.Normal(0.0, student_scales(5.0)[:, None])
    density = normal.log_prob(torch.tensor(x)).exp().mean(0).numpy()
    np.testing.assert_allclose(density, student(5).pdf(x), rtol=0.12)


def test_tails_are_heavy_where_errors_are() -> None:
    random = np.random.default_rng(0)
    normal = torch.tensor(random.normal(size=(2000, 1)))
    assert tails(1.2 * normal, torch.ones(2000)).item() == pytest.approx(1.2, rel=0.05)
    heavy = torch.tensor(random.standard_t(3, size=(2000, 1)))
    scales = tails(heavy, torch.ones(2000))
    assert len(scales) > 1
    assert scales.max() > 2 * scales.min()


@pytest.mark.parametrize("growing", [True, False])
def test_noise_is_predicted_where_it_depends_on_the_row(growing: bool) -> None:
    rows = table(600, 4)
    std = torch.exp(rows.x[:, :1]) if growing else torch.ones(600, 1)
    error = std * torch.randn(600, 1)
    noise = fit_noise(rows._replace(y=rows.y + error), rows.y, 4, PACE)
    assert (noise.net is not None) == growing
    assert noise.std.item() == pytest.approx(error.square().mean().sqrt().item(), rel=1e-4)


def test_a_straight_line_is_nearly_exact_without_training() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 3))
    y = x @ [3.0, -1.0, 0.5] + 7
    model = IBNNRegressor((8,), prior_std=0.3, epochs=1, random_state=0).fit(x, y)
    assert model.score(x, y) > 0.999


@pytest.mark.slow
def test_smooth_functions_are_learnt_to_their_noise_and_intervals_cover() -> None:
    """Noise of a tenth of the signal: within 15 % of it, and 90 % of fresh rows within four standard errors."""
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (1500, 4))
    y = np.sin(3 * x[:, 0]) * x[:, 1] + x[:, 2] ** 2 + 0.05 * random.normal(size=1500)
    model = IBNNRegressor(random_state=0).fit(x[:500], y[:500])
    low, high = model.predict_interval(x[500:], 0.9)
    covered = ((low <= y[500:]) & (y[500:] <= high)).mean()
    assert np.sqrt(((model.predict(x[500:]) - y[500:]) ** 2).mean()) < 0.0575
    assert abs(covered - 0.9) < 4 * np.sqrt(0.09 * (1 / 1000 + 1 / 500))


# ------------------------------------------------------------------------------------------------------ mixed tables


def mixed(rows: int = 200) -> tuple[Any, Any]:
    pandas = pytest.importorskip("pandas")
    random = np.random.default_rng(0)
    colour, size = random.choice(["red", "green", "blue"], rows), random.normal(size=rows)
    y = size + 2.0 * (colour == "red") + 0.1 * random.normal(size=rows)
    frame = pandas.DataFrame({"colour": pandas.Series(colour).astype("category"), "size": size, "new": size > 0})
    frame.loc[::10, "size"] = np.nan
    frame.loc[5::10, "colour"] = np.nan
    return frame, y


def test_frames_with_categories_and_missing_values() -> None:
    frame, y = mixed()
    model = IBNNRegressor((16,), components=2, random_state=0).fit(frame[:150], y[:150])
    assert model.feature_names_in_.tolist() == ["colour", "size", "new"]
    assert model.score(frame[150:], y[150:]) > 0.6
    red, blue = (frame[150:151].assign(colour=colour, size=0.0) for colour in ("red", "blue"))
    assert model.predict(red)[0] - model.predict(blue)[0] == pytest.approx(2.0, abs=0.5)
    assert np.isfinite(model.predict(frame[150:151].assign(colour="violet"))).all()  # never seen
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["size", "colour", "new"]])
    with pytest.raises(ValueError, match="X"):
        model.predict(np.zeros((2, 3)))
    names = np.where(y > 1, "large", "small")
    strings = frame.astype({"colour": object})
    labels = IBNNClassifier((16,), components=2, random_state=0).fit(strings, names, sample_weight=np.ones(len(y)))
    assert labels.score(strings, names) > 0.8


def test_missing_numbers_in_arrays() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 3))
    missing = random.random(200) < 0.3
    y = x[:, 0] + 3.0 * missing  # that a number is missing says something
    x[missing, 1] = np.nan
    model = IBNNRegressor((16,), components=2, random_state=0).fit(x, y)
    assert model.score(x, y) > 0.95
    with pytest.raises(ValueError, match="infinity"):
        model.predict(np.full((1, 3), np.inf))


@pytest.mark.parametrize("labels", [[0, 7], [False, True], ["no", "yes"]])
def test_classes_of_any_kind(labels: Any) -> None:
    x = np.linspace(-1, 1, 60)[:, None]
    y = np.array(labels)[(x[:, 0] > 0).astype(int)]
    model = IBNNClassifier((8,), components=2, class_weight="balanced", random_state=0).fit(x, y)
    assert model.predict([[-1.0], [1.0]]).tolist() == labels
    assert model.predict(x).dtype == y.dtype


@pytest.mark.parametrize(
    ("kind", "rows", "members"), [(IBNNRegressor, 2000, 4), (IBNNRegressor, 1999, 8), (IBNNClassifier, 2000, 8)]
)
def test_many_rows_of_numbers_have_fewer_members(kind: Any, rows: int, members: int) -> None:
    x = np.random.default_rng(0).normal(size=(rows, 2))
    y = (x[:, 0] > 0).astype(int) if kind is IBNNClassifier else x[:, 0]
    model = kind((4,), epochs=1, prior_std=0.1, random_state=0).fit(x, y)
    assert model.model_.net.members == members
