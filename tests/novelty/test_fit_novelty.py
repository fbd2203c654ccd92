"""Novel inputs are told from known ones, by any method, for any task; and what falls back to the base rates."""

import copy
import math

import pytest
import torch
from sklearn.datasets import make_moons
from torch import nn

import ibnn
from ibnn import baselines, nets
from ibnn.novelty import measure


def moons(rows, seed=0):
    x, y = make_moons(rows, noise=0.1, random_state=seed)
    return torch.tensor(x).float(), torch.tensor(y)


@pytest.fixture(scope="module")
def trained():
    """A model of the two moons that `fit` has trained on rows of which a tenth was held out."""
    torch.manual_seed(0)
    model = ibnn.convert(nets.mlp(2, 2, hidden=32), components=4, seed=0)
    ibnn.fit(model, moons(2000), epochs=4, quiet=True)
    return model


def test_fit_lets_a_model_tell_novel_inputs(trained):
    x, _ = moons(4000, seed=1)
    p = trained.predict(x)
    assert p.p_value.shape == (4000,)
    assert p.p_value.dtype == torch.float32
    share, held_out = p.novel(0.05).double().mean(), trained.reference.ranked
    assert held_out == p.ranked == 200
    assert share < 0.05 + 4 * math.sqrt(0.05 * 0.95 / held_out)  # Beta(10, 191)
    far = trained.predict(100 * x[:200])
    assert far.novel(0.01).all()
    assert far.p_value.max() == pytest.approx(1 / (held_out + 1))


def test_far_from_all_data_the_answer_falls_back_to_the_base_rate(trained):
    x, _ = moons(200, seed=1)
    plain, far = trained.predict(100 * x, novelty=False), trained.predict(100 * x, fallback=0.01)
    assert plain.p_value is None
    assert plain.probs.amax(1).mean() > 0.9
    assert far.probs.amax() <= 0.55
    assert (far.epistemic > 0.6).all()
    torch.testing.assert_close(far.total, torch.special.entr(far.probs).sum(1))
    assert torch.equal(trained.predict(100 * x).probs, plain.probs)  # it is asked for


def test_novelty_is_independent_of_draws_batches_and_mode(trained):
    x, _ = moons(60, seed=2)
    whole = trained.predict(x).p_value
    assert torch.equal(trained.predict(x, samples=2, seed=5).p_value, whole)
    torch.testing.assert_close(trained.predict(x, batch_size=7).p_value, whole)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x), batch_size=11)
    torch.testing.assert_close(trained.predict(loader).p_value, whole)
    trained.train()
    assert torch.equal(trained.predict(x).p_value, whole)
    assert trained.reference is not None
    trained.eval()


def test_the_reference_is_part_of_the_state(trained, tmp_path):
    x, _ = moons(60, seed=2)
    expected = trained.predict(x)
    other = ibnn.convert(nets.mlp(2, 2, hidden=32), components=4, seed=1)
    other.load_state_dict(trained.state_dict())
    assert torch.equal(other.predict(x).p_value, expected.p_value)
    trained.save_pretrained(tmp_path / "model")
    loaded = ibnn.load(tmp_path / "model", net=nets.mlp(2, 2, hidden=32))
    assert torch.equal(loaded.predict(x).p_value, expected.p_value)
    assert torch.equal(loaded.predict(9 * x).probs, trained.predict(9 * x).probs)
    copied = copy.deepcopy(trained)
    assert torch.equal(copied.predict(x).p_value, expected.p_value)
    state = {name: value for name, value in trained.state_dict().items() if not name.startswith("reference.")}
    copied.load_state_dict(state)
    assert copied.reference is None
    assert copied.predict(x).p_value is None


def test_statistics_keep_their_precision(trained):
    narrow = copy.deepcopy(trained).half()
    assert {b.dtype for b in narrow.reference.buffers()} == {torch.int64, torch.float32}
    assert copy.deepcopy(trained).double().reference.whiten.dtype == torch.float32


def test_training_further_drops_the_reference(trained):
    model, (x, y) = copy.deepcopy(trained), moons(100)
    model.elbo(x, y, n_data=100)
    assert model.reference is None
    model = copy.deepcopy(trained)
    model.set_posterior(std=0.1)
    assert model.reference is not None
    model.set_posterior(mean=model.posterior().mean.detach())
    assert model.reference is not None
    model.set_posterior(mean=1.0)
    assert model.reference is None
    with pytest.raises(RuntimeError, match="fit_novelty"):
        model.predict(x).novel(0.01)
    with pytest.raises(RuntimeError, match="fit_novelty"):
        measure(model, x)


def test_fit_without_novelty_or_held_out_data_leaves_none():
    x, y = moons(700)
    model = ibnn.convert(nets.mlp(2, 2, hidden=8), components=2, seed=0)
    ibnn.fit(model, (x, y), epochs=1, quiet=True, novelty=False)
    assert model.reference is None
    ibnn.fit(model, (x[:100], y[:100]), epochs=1, quiet=True)
    assert model.reference is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: baselines.Plain(nets.mlp(2, 2, hidden=16)),
        lambda: baselines.MCDropout(nets.mlp(2, 2, hidden=16), rate=0.1),
        lambda: baselines.MeanField(nets.mlp(2, 2, hidden=16)),
        lambda: baselines.SWAG(nets.mlp(2, 2, hidden=16)),
        lambda: baselines.Ensemble([nets.mlp(2, 2, hidden=16) for _ in range(2)]),
    ],
)
def test_every_baseline_tells_novel_inputs(make):
    torch.manual_seed(0)
    x, y = moons(1200)
    method = make()
    ibnn.fit(method, (x[:800], y[:800]), (x[800:], y[800:]), epochs=3, quiet=True)
    p = method.predict(torch.cat([x[800:], 100 * x[800:]]), fallback=0.01)
    assert p.novel(0.01)[400:].all()
    assert p.novel(0.01)[:400].double().mean() <= 0.02
    assert p.probs[400:].amax() <= 0.6
    again = make()
    again.load_state_dict(method.state_dict())
    assert torch.equal(again.predict(x[:30]).p_value, method.predict(x[:30]).p_value)


def test_calibrate_lets_a_pretrained_network_tell_novel_inputs():
    x, y = moons(600)
    model = ibnn.convert(nets.mlp(2, 2, hidden=16), components=2, seed=0)
    ibnn.calibrate(model, (x, y), progress=False)
    assert model.reference.ranked == 600  # every row
    assert len(model.held_out.distances0) == 600
    assert model.predict(100 * x).novel(0.01).all()


def test_inputs_without_labels_are_enough():
    x, _ = moons(600)
    model = ibnn.convert(nets.mlp(2, 2, hidden=16), components=2, seed=0)
    reference = ibnn.fit_novelty(model, x[:300], x[300:])
    assert reference.means == 1
    assert model.predict(100 * x).novel(0.01).all()
    with pytest.raises(ValueError, match="fallback"):
        model.predict(x, fallback=0.01)


def regression(noise="learnt", rows=800):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(rows, 1, generator=generator) * 2 - 1
    y = 5 + torch.sin(3 * x) + 0.1 * torch.randn(rows, 1, generator=generator)
    net = nets.mlp(1, 2 if noise == "predicted" else 1, hidden=16)
    return ibnn.convert(net, likelihood=ibnn.Gaussian(noise=noise), components=2, seed=0), x, y


@pytest.mark.parametrize("noise", ["learnt", "predicted"])
def test_regression_falls_back_to_the_spread_of_the_targets(noise):
    torch.manual_seed(0)
    model, x, y = regression(noise)
    ibnn.fit(model, (x[:500], y[:500]), (x[500:], y[500:]), epochs=5, quiet=True)
    far = model.predict(torch.full((3, 1), 1e4), fallback=0.01)
    assert far.novel(0.01).all()
    torch.testing.assert_close(far.mean, y[:500].mean().expand(3, 1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(far.std, y[:500].std(correction=0).expand(3, 1), rtol=1e-2, atol=1e-3)
    low, high = far.interval(0.9)
    z = 1.6449 * y[:500].std(correction=0)
    torch.testing.assert_close((high - low) / 2, z.expand(3, 1), rtol=1e-2, atol=1e-3)


def test_pieces_with_and_without_novel_rows_are_joined():
    torch.manual_seed(0)
    model, x, y = regression()
    ibnn.fit_novelty(model, (x[:400], y[:400]), (x[400:], y[400:]))
    mixed = torch.cat([x[:40], torch.full((5, 1), 1e4)])
    whole, pieces = model.predict(mixed, fallback=0.05), model.predict(mixed, batch_size=9, fallback=0.05)
    torch.testing.assert_close(pieces.mean, whole.mean)
    torch.testing.assert_close(pieces.interval(0.9), whole.interval(0.9))
    plain = model.predict(mixed[:40], novelty=False)
    known = whole.p_value[:40] > 0.05
    torch.testing.assert_close(whole.quantile(0.3)[:40][known], plain.quantile(0.3)[known])
    torch.testing.assert_close(whole.std[:40][known], plain.std[known])


def test_multilabel_and_dense_outputs():
    torch.manual_seed(0)
    x = torch.randn(600, 4)
    labels = (x[:, :3] > 0.5).float()
    model = ibnn.convert(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), likelihood="bernoulli", components=2, seed=0
    )
    ibnn.fit(model, (x[:400], labels[:400]), (x[400:], labels[400:]), epochs=3, quiet=True)
    far = model.predict(100 * x[:20], fallback=0.01)
    assert far.novel(0.01).all()
    rates = (labels[:400].sum(0) + 1) / 402
    torch.testing.assert_close(far.probs, rates.expand(20, 3), rtol=1e-2, atol=1e-2)
    images = torch.randn(200, 1, 6, 6)
    pixels = (images[:, 0] > 0).long()
    model = ibnn.convert(nn.Conv2d(1, 2, 3, padding=1), components=2, seed=0)
    ibnn.fit(model, (images[:120], pixels[:120]), (images[120:], pixels[120:]), epochs=2, quiet=True)
    p = model.predict(50 * images[:5], fallback=0.05)
    assert p.p_value.shape == (5,)
    assert p.novel(0.05).all()
    assert p.probs.shape == (5, 2, 6, 6)
    assert p.probs.amax() < 0.65
    assert torch.allclose(p.total, torch.special.entr(p.probs).sum(1), atol=1e-5)


def test_sequences_are_seen_without_their_padding():
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
            self.head = nn.Linear(8, 2)

        def forward(self, tokens, attention_mask):
            x = self.layer(self.embed(tokens), src_key_padding_mask=~attention_mask.bool())
            weight = attention_mask[..., None].float()
            return self.head((x * weight).sum(1) / weight.sum(1))

    tokens, lengths = torch.randint(0, 10, (400, 6)), torch.randint(2, 7, (400, 1))
    mask = (torch.arange(6) < lengths).long()
    model = ibnn.convert(Encoder(), components=2, seed=0)
    labels = (tokens[:, 0] > 4).long()
    data = [({"tokens": t, "attention_mask": m}, y) for t, m, y in zip(tokens, mask, labels, strict=True)]
    ibnn.fit_novelty(model, data_set(data[:200]), data_set(data[200:]))
    p = model.predict({"tokens": tokens, "attention_mask": mask})
    other = torch.where(mask.bool(), tokens, 19)
    torch.testing.assert_close(model.predict({"tokens": other, "attention_mask": mask}).p_value, p.p_value)
    foreign = model.predict({"tokens": tokens + 10, "attention_mask": mask})
    assert foreign.p_value.median() < 0.2 < p.p_value.median()


def data_set(rows):
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return len(rows)

        def __getitem__(self, number):
            inputs, label = rows[number]
            return {**inputs, "labels": label}

    return Rows()


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_falling_back_is_a_mixture_whose_new_uncertainty_is_epistemic(weight):
    draws = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).double()
    likelihood, base = ibnn.Categorical(), torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2]).double()
    plain = likelihood.summarise(draws)
    found = likelihood.fall_back(plain, torch.full((4,), weight), base)
    probs = weight * plain.probs + (1 - weight) * base
    torch.testing.assert_close(found.probs, probs)
    torch.testing.assert_close(found.log_probs, probs.log())
    torch.testing.assert_close(found.total, -(probs * probs.log()).sum(1), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.aleatoric, weight * plain.aleatoric)
    assert (found.between >= weight * plain.between - 1e-12).all()
    if weight == 1:
        assert all(torch.equal(getattr(found, name), getattr(plain, name)) for name in ("probs", "between", "within"))


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_a_gaussian_falls_back_to_a_mixture(weight):
    draws = torch.randn(2, 3, 4, 1, generator=torch.Generator().manual_seed(0)).double()
    likelihood, base = ibnn.Gaussian(init_std=0.5).double(), torch.tensor([2.0, 3.0]).double()
    plain = likelihood.summarise(draws)
    found = likelihood.fall_back(plain, torch.full((4,), weight), base)
    y = torch.linspace(-1, 3, 4).double()[:, None]
    normal = torch.distributions.Normal(2.0, 3.0)
    expected = weight * plain.log_prob(y).exp() + (1 - weight) * normal.log_prob(y).exp()
    torch.testing.assert_close(found.log_prob(y).exp(), expected)
    grid = torch.linspace(-40, 40, 200_001).double()[:, None, None]
    density = torch.stack([found.log_prob(part.expand(4, 1)) for part in grid[::400]]).exp()
    step = float(grid[400, 0, 0] - grid[0, 0, 0])
    mean = (density * grid[::400]).sum(0) * step
    torch.testing.assert_close(found.mean, mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        found.variance, (density * (grid[::400] - mean).square()).sum(0) * step, rtol=1e-3, atol=0
    )
    torch.testing.assert_close(found.aleatoric, weight * plain.aleatoric)
    below = found.quantile(0.2)
    mass = weight * torch.special.ndtr((below - plain.draw_means) / plain.draw_stds).mean(0)
    mass += (1 - weight) * torch.special.ndtr((below - 2) / 3)
    torch.testing.assert_close(mass, torch.full((4, 1), 0.2).double())


def test_heads_and_weighted_rows_fall_back_each_by_its_own():
    torch.manual_seed(0)
    heads = ibnn.Heads({"a": ibnn.Categorical(), "b": ibnn.Gaussian()})
    outputs = {"a": torch.randn(6, 3), "b": torch.randn(6, 1)}
    target = heads.pack({"a": torch.tensor([0, 0, 0, 1, 1, 2]), "b": torch.randn(6, 1)})
    draws = heads.read(outputs)[None, None]
    p = heads.summarise(draws)
    base = heads.base_rates(target)
    found = heads.fall_back(p, torch.zeros(6), base)
    torch.testing.assert_close(found["a"].probs, (torch.tensor([4.0, 3.0, 2.0]) / 9).expand(6, 3))
    torch.testing.assert_close(found["b"].mean, target[:, 1:].mean(0).expand(6, 1))


def test_nodes_that_never_varied_may_wake_up():
    """A node that is 0 for all known inputs, and not for a new one, makes that novel."""
    x = torch.randn(300, 3)
    x[:, 2] = 0
    model = ibnn.convert(nn.Linear(3, 2), components=2, seed=0)
    ibnn.fit_novelty(model, x)
    new = torch.cat([x[:1], x[:1] + torch.tensor([0.0, 0.0, 1.0])])
    known, woken = measure(model, new).p_value
    assert known > 0.02
    assert woken < 0.02
    constant = torch.ones(300, 3)
    ibnn.fit_novelty(model, constant)
    assert measure(model, constant[:1]).p_value == 1
    assert measure(model, constant[:1] + 1).p_value < 0.02


def test_bad_input_is_refused_and_nothing_changes(trained):
    x, y = moons(400)
    before = trained.reference
    wrong = {
        "train": {"train": (x[:30], y[:30]), "valid": (x, y)},
        "valid": {"train": (x, y), "valid": (x[:30], y[:30])},
        "rows": {"train": (x, y), "rows": 3},
        "NaN": {"train": (torch.full_like(x, math.nan), y)},
        "labels from 0 to 9": {"train": (x, y), "valid": (x, y + 8 * y)},
        "gets an input of shape": {"train": (torch.randn(400, 3), y)},
    }
    for match, options in wrong.items():
        with pytest.raises(ValueError, match=match):
            ibnn.fit_novelty(trained, **options)
    with pytest.raises(TypeError, match=r"baselines\.Plain"):
        ibnn.fit_novelty(nn.Linear(2, 2), (x, y))
    with pytest.raises(ValueError, match="level"):
        trained.predict(x).novel(1.5)
    with pytest.raises(ValueError, match="fallback"):
        trained.predict(x, fallback=-1)
    assert trained.reference is before


def test_a_reference_of_another_network_is_refused(trained):
    x, _ = moons(60)
    for other in (nets.mlp(2, 2, hidden=8), nn.Linear(2, 2)):
        model = ibnn.convert(other, components=2, seed=0)
        model.reference = trained.reference
        with pytest.raises(ValueError, match=r"model\.reference"):
            model.predict(x)


def test_dicts_without_labels_and_loaders_that_cannot_be_split():
    class Named(nn.Linear):
        def forward(self, points):
            return super().forward(points)

    x, y = moons(400)
    model = ibnn.convert(nn.Sequential(Named(2, 2))[0], components=2, seed=0)
    ibnn.fit_novelty(model, {"points": x})
    assert model.predict({"points": 100 * x}).novel(0.01).all()
    rows = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(rows, sampler=torch.utils.data.SubsetRandomSampler(range(300)))
    with pytest.raises(ValueError, match="Pass valid"):
        ibnn.fit_novelty(model, loader)


def test_layers_that_do_not_see_the_batch_are_left_out():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.places, self.made, self.head = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(torch.tanh(x + self.made(self.places).sum(0)))

    x = torch.randn(300, 3)
    model = baselines.Plain(Table())
    assert ibnn.fit_novelty(model, x).layers.tolist() == [1]


def test_equal_inputs_are_equally_novel_in_any_batch():
    """Rows of 0 and 1 tie with held-out ones; rounding, which differs by batch, must not break the ties."""
    torch.manual_seed(0)
    x = (torch.rand(600, 5) > 0.5).float()
    model = ibnn.convert(nets.mlp(5, 2, hidden=32), components=2, seed=0)
    ibnn.fit_novelty(model, x[:300], x[300:])
    whole = model.predict(x[:60]).p_value
    assert torch.equal(model.predict(x[:60], batch_size=1).p_value, whole)


# ---------------------------------------------------------------------------------------------------- false alarms


@pytest.mark.parametrize("splits", [120, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("rows", "valid"), [(60, True), (200, False), pytest.param(1000, False, marks=pytest.mark.slow)]
)
def test_false_alarms_are_as_frequent_as_promised(rows, valid, splits):
    """Over many held-out sets, the share of new inputs with a p-value of at most α is at most α, and not far below.

    It is below where four small groups must agree. 400 known inputs where the held-out ones are others.
    """
    torch.manual_seed(0)
    new, level = 100, 0.05
    model, alarms = baselines.Plain(nets.mlp(4, 2, hidden=6)), []
    for seed in range(splits):
        held, other = torch.randn(rows, 4), torch.randn(new, 4)
        ibnn.fit_novelty(model, *((torch.randn(400, 4), held) if valid else (held,)), seed=seed, batch_size=1000)
        alarms.append((measure(model, other).p_value <= level).double().mean())
    found = torch.stack(alarms)
    error = float(found.std()) / splits**0.5
    assert 0.7 * level - 4 * error < float(found.mean()) < level + 4 * error
    ranked = model.reference.ranked
    spread = math.sqrt(level * (1 - level) * (1 / ranked + 1 / new))  # of Beta, and of new inputs
    assert float(found.std()) < 1.5 * spread


def test_only_too_few_rows_and_unobservable_networks_are_forgiven(monkeypatch):
    x, y = moons(600)
    model = ibnn.convert(nets.mlp(2, 2, hidden=8), components=2, seed=0)

    def fails(*_, **__):
        raise RuntimeError("of its own")

    monkeypatch.setattr("ibnn.novelty.fitting.see", fails)
    with pytest.raises(RuntimeError, match="of its own"):
        ibnn.fit(model, (x[:400], y[:400]), (x[400:], y[400:]), epochs=1, quiet=True)
    ibnn.fit(model, (x[:400], y[:400]), (x[400:440], y[400:440]), epochs=1, quiet=True)  # 40 are too few
    assert model.reference is None


def test_a_plain_network_tells_novel_inputs():
    torch.manual_seed(0)
    net, (x, y) = nets.mlp(2, 2, hidden=16), moons(600)
    model = baselines.Plain(net)
    ibnn.fit_novelty(model, (x[:300], y[:300]), (x[300:], y[300:]))
    p = model.predict(torch.cat([x[:5], 100 * x[:5]]))
    assert p.novel(0.01).tolist() == [False] * 5 + [True] * 5
    torch.testing.assert_close(p.probs, net(torch.cat([x[:5], 100 * x[:5]])).softmax(-1))
