"""Sets and intervals cover as often as they promise."""

import copy
import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ibnn
from ibnn import nets
from ibnn.prediction import Conformal, mass_above


@pytest.mark.parametrize("size", [3, 9, 19, 100])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_coverage_is_exact_over_splits(size, level):
    """Without ties ⌈(n + 1) level⌉ / (n + 1), or 1 where n is too small."""
    splits = 4000
    scores = torch.rand(splits, size + 1, generator=torch.Generator().manual_seed(0)).double()
    limits = torch.stack([Conformal(row[1:], torch.zeros(0)).limit(level) for row in scores])
    expected = min(math.ceil((size + 1) * level - 1e-9) / (size + 1), 1.0)
    error = math.sqrt(expected * (1 - expected) / splits)
    assert abs((scores[:, 0] <= limits).double().mean() - expected) <= 4 * error
    assert expected >= level


def test_too_few_examples_promise_nothing():
    assert Conformal(torch.rand(8), torch.zeros(0)).limit(0.9) == math.inf
    assert Conformal(torch.rand(9), torch.zeros(0)).limit(0.9) < math.inf
    with pytest.raises(ValueError, match="level"):
        Conformal(torch.rand(8), torch.zeros(0)).limit(1.0)


def test_mass_above_counts_classes_in_order():
    probs = torch.rand(50, 6, generator=torch.Generator().manual_seed(0)).double()
    probs /= probs.sum(1, keepdim=True)
    expected = torch.stack([(probs * (probs > probs[:, c : c + 1])).sum(1) for c in range(6)], 1)
    torch.testing.assert_close(mass_above(probs), expected)


def noisy_classes(rows, seed):
    """Three classes that overlap; the last is rare."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), rows, replacement=True, generator=generator)
    centres = torch.tensor([[0.0, 0.0], [1.5, 0.0], [0.0, 1.5]])
    return centres[y] + torch.randn(rows, 2, generator=generator), y


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    model = ibnn.convert(nets.mlp(2, 3, hidden=16), components=2, seed=0)
    ibnn.fit(model, noisy_classes(1000, 0), noisy_classes(1000, 1), epochs=8, quiet=True)
    return model


def test_sets_cover_the_true_class(classifier):
    x, y = noisy_classes(6000, 2)
    p = classifier.predict(x)
    rows = torch.arange(len(y))
    sizes = []
    for level in (0.8, 0.9, 0.95):
        inside = p.set(level)
        covered = inside[rows, y].double().mean()
        # Beta(level·n, (1 − level)·n) for n = 1,000 held-out rows; the most probable class may add to it
        assert level - 4 * math.sqrt(level * (1 - level) / 1000) <= covered
        assert inside[rows, p.labels].all()
        sizes.append(inside.double().sum(1).mean())
    assert sizes[0] < sizes[1] < sizes[2] < 3


def test_sets_by_class_cover_rare_classes(classifier):
    x, y = noisy_classes(6000, 2)
    p, rows = classifier.predict(x), torch.arange(len(y))
    inside = p.set(0.9, by_class=True)[rows, y].double()
    for label in range(3):
        held_out = int((classifier.reference.classes == label).sum())
        assert inside[y == label].mean() >= 0.9 - 4 * math.sqrt(0.09 / held_out)
    on_average = p.set(0.9)[rows, y].double()
    assert on_average[y == 2].mean() < inside[y == 2].mean()


@pytest.mark.parametrize("noise", ["learnt", "predicted"])
def test_intervals_cover_where_the_model_is_too_sure(noise):
    """The noise is far too small, and conformal intervals still cover."""
    torch.manual_seed(0)

    def data(rows, seed):
        x = torch.rand(rows, 1, generator=torch.Generator().manual_seed(seed)) * 2 - 1
        return x, torch.sin(3 * x) + 0.5 * torch.randn(rows, 1, generator=torch.Generator().manual_seed(seed + 1))

    net = nets.mlp(1, 2 if noise == "predicted" else 1, hidden=16)
    model = ibnn.convert(net, likelihood=ibnn.Gaussian(noise=noise, init_std=0.1), components=2, seed=0)
    ibnn.fit_novelty(model, data(300, 0), data(1000, 10))
    x, y = data(5000, 20)
    p = model.predict(x)
    for level in (0.8, 0.9):
        low, high = p.interval(level, conformal=True)
        covered = ((low <= y) & (y <= high)).double().mean()
        assert abs(covered - level) <= 4 * math.sqrt(level * (1 - level) / 1000)
    low, high = p.interval(0.9)
    assert ((low <= y) & (y <= high)).double().mean() < 0.7 or noise == "predicted"


@pytest.mark.parametrize("kind", ["fit", "loader", "many"])
def test_intervals_cover_where_held_out_rows_are_sorted(kind):
    """The first half has little noise, and more rows are held out than are answered (or ranked, of "many")."""
    torch.manual_seed(0)

    def data(rows, seed):
        generator, hard = torch.Generator().manual_seed(seed), torch.arange(rows)[:, None] >= rows // 2
        x = torch.randn(rows, 1, generator=generator)
        return x, x + torch.where(hard, 3.0, 0.3) * torch.randn(rows, 1, generator=generator)

    model = ibnn.convert(torch.nn.Linear(1, 1), components=2, likelihood="gaussian", seed=0)
    valid = data(8000 if kind == "many" else 4000, 1)
    if kind == "fit":
        ibnn.fit(model, data(1000, 0), valid, epochs=2, quiet=True)
    else:
        loader = DataLoader(TensorDataset(*valid), batch_size=500, shuffle=False)
        ibnn.fit_novelty(model, data(1000, 0), loader if kind == "loader" else valid)
    x, y = data(4000, 2)
    low, high = model.predict(x).interval(0.9, conformal=True)
    answered = len(model.reference.errors)
    assert 2000 <= answered < 2500
    assert abs(((low <= y) & (y <= high)).double().mean() - 0.9) < 4 * math.sqrt(0.09 / answered + 0.09 / 4000)


def test_answers_made_otherwise_promise_nothing(classifier):
    x, _ = noisy_classes(20, 2)
    model = copy.deepcopy(classifier)
    model.likelihood.set_temperature(3.0)
    assert model.predict(x).conformal is None
    model = copy.deepcopy(classifier)
    model.set_posterior(std=0.5)
    assert model.predict(x).conformal is None
    assert model.predict(x).p_value is not None


def test_without_held_out_labels_there_is_nothing_to_promise():
    x, y = noisy_classes(400, 0)
    model = ibnn.convert(nets.mlp(2, 3, hidden=16), components=2, seed=0)
    with pytest.raises(RuntimeError, match="held-out"):
        model.predict(x).set(0.9)
    ibnn.fit_novelty(model, x)
    with pytest.raises(RuntimeError, match="held-out"):
        model.predict(x).set(0.9)
    ibnn.fit_novelty(model, (x, y))
    assert model.predict(x).set(0.9).shape == (400, 3)
