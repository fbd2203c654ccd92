"""Sets and intervals cover as often as they promise: every kind of set, output and group."""

import copy
import math
from typing import Any

import pytest
import torch
from coverage_cases import EVERY, KINDS, Same, classes, covered
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ibnn
from ibnn import baselines, nets
from ibnn.prediction import Conformal
from ibnn.prediction.conformal import more_probable


def of_scores(scores: Tensor, **fields: Tensor) -> Conformal:
    """Distances of numbers, (N,) or (N, O, P)."""
    scores = scores if scores.dim() == 3 else scores[:, None, None]
    return Conformal(scores[..., None], torch.zeros(scores.shape, dtype=torch.int64), **fields)


def limit(scores: Tensor, level: float) -> float:
    return of_scores(scores).limits(of_scores(scores).distances[..., 0], level).item()


@pytest.mark.parametrize("size", [3, 9, 19, 100])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_coverage_is_exact_over_splits(size: int, level: float) -> None:
    """Without ties ⌈(n + 1) level⌉ / (n + 1), or 1 where n is too small."""
    splits = 4000
    scores = torch.rand(splits, size + 1, generator=torch.Generator().manual_seed(0)).double()
    held = of_scores(scores[:, 1:].T[:, :, None])  # every split is an output with its own limit
    limits = held.limits(held.distances[..., 0], level)[0, 0]
    expected = min(math.ceil((size + 1) * level - 1e-9) / (size + 1), 1.0)
    error = math.sqrt(expected * (1 - expected) / splits)
    assert abs((scores[:, 0] <= limits).double().mean() - expected) <= 4 * error
    assert expected >= level


def test_too_few_examples_promise_nothing() -> None:
    assert limit(torch.rand(8), 0.9) == math.inf
    assert limit(torch.rand(9), 0.9) < math.inf
    assert limit(torch.rand(9), 0.0) == -math.inf
    assert limit(torch.rand(9), 1.0) == math.inf
    with pytest.raises(ValueError, match="level"):
        limit(torch.rand(8), 1.1)


def test_limits_of_places_against_a_slow_reference() -> None:
    """The smallest score at which the mean share of missed places, with one more example that misses all, is α."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(30, 1, 7, generator=generator, dtype=torch.float64)
    scores[torch.rand(30, 1, 7, generator=generator) < 0.4] = math.nan
    for level in (0.5, 0.8, 0.9):
        rows = [[s for s in row if not math.isnan(s)] for row in scores[:, 0].tolist()]
        rows = [row for row in rows if row]
        candidates = sorted(score for row in rows for score in row)

        def risk(bound: float, rows: list[list[float]] = rows) -> float:
            return (sum(sum(s > bound for s in row) / len(row) for row in rows) + 1) / (len(rows) + 1)

        expected = next(bound for bound in candidates if risk(bound) <= 1 - level + 1e-12)
        found = of_scores(scores).limits(scores, level)
        assert found.item() == expected


def test_order_of_probability_against_sums() -> None:
    probs = torch.rand(50, 6, generator=torch.Generator().manual_seed(0)).double()
    probs /= probs.sum(1, keepdim=True)
    mass, number = more_probable(probs)
    higher = probs[:, None, :] > probs[:, :, None]
    torch.testing.assert_close(mass, (probs[:, None, :] * higher).sum(2))
    torch.testing.assert_close(number, higher.sum(2).double())


# --------------------------------------------------------------------------------------------------- outputs and kinds


def check_coverage(kind: str, n: int, splits: int) -> None:
    """On average over splits at least 90 %, and no more than 1 / (n + 1) above unless there are ties or few rows."""
    of_split = torch.stack([covered(kind, n, seed).double().mean(0) for seed in range(splits)]).view(splits, -1)
    mean, error = of_split.mean(0), of_split.std(0) / math.sqrt(splits)
    assert (mean >= 0.9 - 4 * error).all(), (mean, error)
    few = {"by class": n // 8, "groups": n // 3}.get(kind, n)  # rows behind a limit
    if kind not in ("adaptive", "penalty", "tokens"):  # the true class is often the first: ties
        assert (mean <= 0.9 + 1 / (few + 1) + 4 * error).all(), (mean, error)


@pytest.mark.parametrize("kind", EVERY)
def test_coverage_of_every_output(kind: str) -> None:
    check_coverage(kind, 60, 60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("n", [60, 200, 1000])
def test_coverage_over_a_thousand_splits(kind: str, n: int) -> None:
    check_coverage(kind, n, 1000)


def test_smallest_sets_are_smallest() -> None:
    """With the right probabilities no other sets that cover are smaller on average."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9000, 30, generator=generator) * torch.rand(9000, 1, generator=generator) * 4
    y = torch.multinomial(x.softmax(1), 1, generator=generator)[:, 0]
    model = baselines.Plain(Same())
    ibnn.conformalize(model, (x[:3000], y[:3000]))
    p = model.predict(x[3000:])
    sizes = {kind: p.set(0.9, **options).sum(1).double().mean() for kind, options in KINDS.items()}
    assert min(sizes, key=lambda kind: sizes[kind]) == "smallest"
    assert p.set(0.9, kind="adaptive").any(1).all()
    for kind in ("smallest", "adaptive"):
        assert (p.set(0.8, kind=kind) <= p.set(0.9, kind=kind)).all()
    with pytest.raises(ValueError, match="penalty"):
        p.set(0.9, penalty=0.1)
    with pytest.raises(ValueError, match=r"`kind`.*'adaptive'"):
        p.set(0.9, kind="raps")  # type: ignore[arg-type]


def test_coverage_holds_within_groups_and_classes() -> None:
    """The limits are those of a model that has held out the group, or the class, alone."""
    x, y = classes(600, 0)
    g = torch.arange(600) % 3
    model, alone = baselines.Plain(Same()), baselines.Plain(Same())
    ibnn.conformalize(model, (x[:500], y[:500]), groups=g[:500])
    p = model.predict(x[500:])
    for group in range(3):
        held = g[:500] == group
        ibnn.conformalize(alone, (x[:500][held], y[:500][held]))
        late = g[500:] == group
        expected = alone.predict(x[500:][late])
        assert torch.equal(p.set(0.9, groups=g[500:])[late], expected.set(0.9))
        assert torch.equal(p.set(0.9, groups=g[500:], by_class=True)[late], expected.set(0.9, by_class=True))
    assert p.set(0.9, groups=torch.full((100,), 7)).all()  # nothing is known about that group
    for label in range(4):
        ibnn.conformalize(alone, (x[:500][y[:500] == label], y[:500][y[:500] == label]))
        torch.testing.assert_close(p.set(0.9, by_class=True)[:, label], alone.predict(x[500:]).set(0.9)[:, label])
    with pytest.raises(ValueError, match="groups"):
        p.set(0.9, groups=g)
    ibnn.conformalize(model, (x, y))
    with pytest.raises(RuntimeError, match="groups"):
        model.predict(x).set(0.9, groups=g)


def test_sets_of_segmentations_have_the_shape_of_probabilities() -> None:
    """Classes in axis 1; more places than are stored; batches of other sizes."""
    torch.manual_seed(0)
    x = torch.randn(40, 4, 9, 9)
    y = torch.multinomial(x.softmax(1).movedim(1, -1).reshape(-1, 4), 1).reshape(40, 9, 9)
    model = baselines.Plain(Same(), ibnn.Categorical(axis=1))
    found = ibnn.conformalize(model, (x[:30], y[:30]), batch_size=16)
    assert found.distances0.shape == (30, 1, 32, 3)
    inside = model.predict(x[30:]).set(0.8)
    assert inside.shape == (10, 4, 9, 9)
    assert abs(inside.gather(1, y[30:, None]).double().mean() - 0.8) < 0.1


def test_one_logit_has_the_sets_of_two_classes() -> None:
    x, _ = classes(300, 0)
    y = (torch.rand(300, generator=torch.Generator().manual_seed(1)) < x[:, 0].sigmoid()).long()
    one, two = baselines.Plain(Same(), ibnn.Bernoulli()), baselines.Plain(Same())
    logits = torch.stack([torch.zeros(300), x[:, 0]], 1)
    ibnn.conformalize(one, (x[:200, :1], y[:200, None].float()))
    ibnn.conformalize(two, (logits[:200], y[:200]))
    for options in KINDS.values():
        expected = two.predict(logits[200:]).set(0.8, **options)
        assert torch.equal(one.predict(x[200:, :1]).set(0.8, **options)[:, 0], expected)


# ------------------------------------------------------------------------------------------------------ whole networks


def noisy_classes(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three classes that overlap; the last is rare."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), rows, replacement=True, generator=generator)
    centres = torch.tensor([[0.0, 0.0], [1.5, 0.0], [0.0, 1.5]])
    return centres[y] + torch.randn(rows, 2, generator=generator), y


@pytest.fixture(scope="module")
def classifier() -> ibnn.IBNN:
    torch.manual_seed(0)
    model = ibnn.convert(nets.mlp(2, 3, hidden=16), components=2, seed=0)
    ibnn.fit(model, noisy_classes(1000, 0), noisy_classes(1000, 1), epochs=8, quiet=True)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_sets_of_a_trained_network_cover(classifier: ibnn.IBNN, kind: str) -> None:
    x, y = noisy_classes(6000, 2)
    p, rows = classifier.predict(x), torch.arange(6000)
    sizes = []
    for level in (0.8, 0.9, 0.95):
        inside = p.set(level, **KINDS[kind])
        # Beta(level·n, (1 − level)·n) for n = 1,000 held-out rows; the most probable class may add to it
        assert level - 4 * math.sqrt(level * (1 - level) / 1000) <= inside[rows, y].double().mean()
        sizes.append(inside.double().sum(1).mean())
    assert sizes[0] < sizes[1] < sizes[2] < 3


def test_scores_are_saved(classifier: ibnn.IBNN, tmp_path: Any) -> None:
    x, y = noisy_classes(50, 2)
    model = copy.deepcopy(classifier)
    ibnn.conformalize(model, noisy_classes(300, 5), groups=torch.arange(300) % 2)
    model.save_pretrained(tmp_path)
    loaded = ibnn.load(tmp_path, nets.mlp(2, 3, hidden=16))
    for options in (*KINDS.values(), {"groups": y % 2}):
        assert torch.equal(loaded.predict(x).set(0.9, **options), model.predict(x).set(0.9, **options))


def test_calibration_covers_all_heads() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Same("a", "b"))
    heads = ibnn.Heads({"a": ibnn.Categorical(), "b": ibnn.Gaussian(outputs=4)})
    model = ibnn.convert(net, likelihood=heads, components=2, seed=0)
    x = torch.randn(400, 8)
    y = {"a": torch.randint(4, (400,)), "b": torch.randn(400, 4)}
    ibnn.calibrate(model, (x, y), progress=False)
    p = model.predict(x)
    assert p["a"].set(0.9).gather(1, y["a"][:, None]).double().mean() >= 0.9
    low, high = p["b"].interval(0.9, conformal=True)
    assert (((low <= y["b"]) & (y["b"] <= high)).double().mean(0) >= 0.9).all()


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
    answered = len(model.held_out.distances0)
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


# --------------------------------------------------------------------------------------------------- uncut batches


class Ring(nn.Module):
    """Rows are the nodes of a graph: each adds up its neighbours, given as an index of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        hidden = self.first(x + torch.zeros_like(x).index_add(0, edges[0], x[edges[1]])).relu()
        out: Tensor = self.head(hidden)
        return out


def test_graphs_are_never_cut_with_batch_size_none() -> None:
    """Calibration, novelty, sets and diagnosis of a graph; nodes with ignored targets are not held out."""
    torch.manual_seed(0)
    rows = 600
    x, edges = torch.randn(rows, 5), torch.stack([torch.arange(rows), torch.arange(rows).roll(1)])
    net = Ring()
    y = (3 * net(x, edges)).softmax(1).multinomial(1)[:, 0]
    held = torch.where(torch.arange(rows) % 2 == 0, y, -100)
    model = ibnn.convert(net, components=2, seed=0)
    with pytest.raises(ValueError, match="batch_size=None"):
        ibnn.calibrate(model, ((x, edges), held), progress=False)
    with pytest.raises(ValueError, match="batch_size=None"):
        ibnn.fit_novelty(model, ((x, edges), held))
    with pytest.raises(ValueError, match="batch_size=None"):
        ibnn.conformalize(model, ((x, edges), held))
    ibnn.calibrate(model, ((x, edges), held), batch_size=None, progress=False)
    assert model.reference is not None
    assert model.held_out is not None
    assert model.reference.ranked == len(model.held_out.distances0) == 300
    p = model.predict((x, edges), batch_size=None)
    assert p.set(0.9)[torch.arange(rows), y].double().mean() > 0.85
    before = model.held_out.distances0
    ibnn.fit_novelty(model, ((x, edges), held), batch_size=None)
    torch.testing.assert_close(model.held_out.distances0.sort(0).values, before.sort(0).values)
    ibnn.conformalize(model, ((x, edges), held), batch_size=None)
    torch.testing.assert_close(p.set(0.9), model.predict((x, edges), batch_size=None).set(0.9))
    ibnn.diagnose(model, inputs=(x, edges), batch_size=None)
    with pytest.raises(ValueError, match="batch_size=None"):
        ibnn.diagnose(model, inputs=(x, edges))
