import math

import pytest
import torch
import torch.nn.functional as F
from reference import check_split, entropy_split, variance_split
from torch import Tensor, nn

import ibnn
from ibnn import Bernoulli, Categorical, Gaussian

SPLIT = ("aleatoric", "between", "within")


# ----------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_categorical_nll_is_torch_s_cross_entropy(dense: bool, weighted: bool, smoothing: float) -> None:
    shape = (6, 4, 3, 2) if dense else (6, 4)
    logits, target = torch.randn(shape), torch.randint(4, (6, *shape[2:]))
    target[0] = -100
    weight = torch.rand(4) if weighted else None
    likelihood = Categorical(weight=weight, label_smoothing=smoothing)
    expected = F.cross_entropy(logits, target, weight=weight, label_smoothing=smoothing)
    terms = likelihood.terms(logits, target)
    torch.testing.assert_close(terms.loss, expected)
    torch.testing.assert_close(terms.nll, F.cross_entropy(logits, target))
    kept = target[target != -100]
    assert likelihood.count(target) == int(terms.count) == len(kept)
    total = len(kept) if weight is None else weight[kept].sum().item()
    assert float(terms.weight) == float(likelihood.total_weight(target)) == pytest.approx(total)


def test_a_batch_of_nothing_but_ignored_targets_costs_nothing() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    loss = Categorical(weight=torch.rand(4)).terms(logits, torch.full((3,), -100)).loss
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(logits.grad, torch.zeros(3, 4))


def test_gaussian_nll_is_the_log_density() -> None:
    likelihood = Gaussian(init_std=0.7, outputs=2)
    mean, y = torch.randn(5, 2), torch.randn(5, 2)
    expected = -torch.distributions.Normal(mean, 0.7).log_prob(y).mean()
    torch.testing.assert_close(likelihood.terms(mean, y).nll, expected)


def test_gaussian_predicted_noise() -> None:
    output, y = torch.randn(5, 4), torch.randn(5, 2)
    std = (F.softplus(output[:, 2:]) + 1e-6).sqrt()
    expected = -torch.distributions.Normal(output[:, :2], std).log_prob(y).mean()
    likelihood = Gaussian(noise="predicted")
    torch.testing.assert_close(likelihood.terms(output, y).nll, expected)
    assert not list(likelihood.parameters())


def test_bernoulli_nll() -> None:
    logits, y = torch.randn(5, 3), torch.randint(2, (5, 3))
    expected = F.binary_cross_entropy_with_logits(logits, y.float())
    assert torch.equal(Bernoulli().terms(logits, y).nll, expected)


def test_learnt_noise_finds_the_noise() -> None:
    torch.manual_seed(1)
    x = torch.rand(200, 1) * 2 - 1
    y = 2 * x + 0.3 * torch.randn(200, 1)
    model = ibnn.convert(nn.Linear(1, 1), components=2, likelihood="gaussian", prior_std=0.01, init_std=0.0)
    model.set_posterior(std=0.01)
    optimiser = torch.optim.Adam(model.parameter_groups(lr=0.05, latent_lr=0.0))
    for _ in range(300):
        optimiser.zero_grad()
        model.elbo(x, y, n_data=200).loss.backward()
        optimiser.step()
    residual = (y - model.net(x)).std(correction=0).item()
    assert model.likelihood.log_std.exp().item() == pytest.approx(residual, rel=0.03)


def test_the_nll_of_heads_has_no_class_weights_or_smoothing() -> None:
    logits, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, 1, 1, -100])
    smooth = Categorical(weight=torch.tensor([1.0, 2.0, 5.0]), label_smoothing=0.3)
    smooth.set_temperature(2.0)
    heads = ibnn.Heads({"a": smooth, "b": Categorical()})
    output = heads.read({"a": logits, "b": logits})
    terms = heads.terms(output, heads.pack({"a": labels, "b": labels}))
    torch.testing.assert_close(terms.nll, F.cross_entropy(logits, labels))  # at the common temperature
    nll, own = (
        F.cross_entropy(logits, labels),
        F.cross_entropy(logits, labels, weight=smooth.weight, label_smoothing=0.3),
    )
    weights = (float(smooth.weight[labels[:5]].sum()), 5.0)
    torch.testing.assert_close(terms.loss, (own * weights[0] + nll * weights[1]) / sum(weights))


# ------------------------------------------------------------------------------------------------------ predictions


def entropy(p: Tensor) -> Tensor:
    return -(p * p.log()).sum(-1)


def test_categorical_split_against_a_slow_reference() -> None:
    draws = 2 * torch.randn(3, 4, 5, 6, dtype=torch.float64)  # (K, S, B, C)
    p = Categorical().summarise(draws)
    probs = draws.softmax(-1)
    for row in range(5):
        mean = sum(probs[k, s, row] for k in range(3) for s in range(4)) / 12
        aleatoric = sum(entropy(probs[k, s, row]) for k in range(3) for s in range(4)) / 12
        components = [probs[k, :, row].mean(0) for k in range(3)]
        between = entropy(mean) - sum(map(entropy, components)) / 3
        torch.testing.assert_close(p.probs[row], mean)
        torch.testing.assert_close(p.total[row], entropy(mean))
        torch.testing.assert_close(p.aleatoric[row], aleatoric)
        torch.testing.assert_close(p.between[row], between)
        torch.testing.assert_close(p.within[row], entropy(mean) - aleatoric - between)
        pairs = (probs[0, :, row] + probs[1, :, row], probs[2, :, row])  # mirror images, and what is left
        error = sum(pair.var(0) / 4 for pair in pairs).sqrt() / 3
        torch.testing.assert_close(p.standard_error[row], error)
    torch.testing.assert_close(p.log_probs.exp(), p.probs)
    assert torch.equal(p.labels, p.probs.argmax(1))


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian(), Gaussian(noise="predicted")])
def test_the_split_is_that_of_a_loop_in_float64(likelihood: ibnn.Likelihood, scale: float) -> None:
    """Total is the entropy (variance) of the mixture, and no part is negative, also where rounding is coarse."""
    draws = scale * torch.randn(4, 3, 50, 6)
    if not isinstance(likelihood, Gaussian):
        check_split(likelihood.summarise(draws), entropy_split(draws, isinstance(likelihood, Bernoulli)))
    elif likelihood.noise == "predicted":
        expected = variance_split(draws[..., :3], F.softplus(draws[..., 3:].double()) + 1e-6)
        check_split(likelihood.summarise(draws), expected)
    else:
        check_split(likelihood.summarise(draws), variance_split(draws, torch.ones_like(draws)))


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Gaussian()])
def test_identical_draws_have_no_epistemic_uncertainty(likelihood: ibnn.Likelihood) -> None:
    p = likelihood.summarise(torch.randn(7, 3).expand(4, 5, 7, 3))
    torch.testing.assert_close(p.epistemic, torch.zeros_like(p.epistemic), atol=1e-6, rtol=0)
    assert (p.standard_error < 1e-6).all()


def test_between_and_within_tell_components_from_draws() -> None:
    by_component = torch.randn(4, 1, 7, 3).expand(4, 5, 7, 3)
    p = Categorical().summarise(by_component)
    assert p.within.abs().max() < 1e-6 < p.between.min()
    by_draw = torch.randn(1, 5, 7, 3).expand(4, 5, 7, 3)
    p = Categorical().summarise(by_draw)
    assert p.between.abs().max() < 1e-6 < p.within.min()


def test_masked_classes_are_no_nan() -> None:
    draws = torch.randn(2, 2, 3, 4)
    draws[..., 0] = -math.inf
    p = Categorical().summarise(draws)
    assert (p.probs[:, 0] == 0).all()
    assert p.total.isfinite().all()


def test_one_draw_per_component_counts_the_spread_of_components_as_error() -> None:
    draws = torch.randn(4, 1, 3, 2)
    found = Categorical().summarise(draws).standard_error
    torch.testing.assert_close(found, draws[:, 0].softmax(-1).std(0) / 2)
    torch.testing.assert_close(Gaussian().summarise(draws).standard_error, draws[:, 0].std(0) / 2)
    for likelihood in (Categorical(), Gaussian()):
        assert likelihood.summarise(draws[:1]).standard_error.isnan().all()


def test_the_error_of_one_draw_per_component_is_no_less_than_the_spread_of_repeats() -> None:
    model = ibnn.convert(nn.Linear(4, 3), components=6, init_std=0.5, seed=0)
    model.set_posterior(std=0.3)
    repeats = [model.predict(torch.ones(1, 4), samples=1, seed=seed) for seed in range(400)]
    claimed = torch.stack([p.standard_error for p in repeats]).square().mean(0).sqrt()
    spread = torch.stack([p.probs for p in repeats]).std(0)
    assert (claimed > spread).all()  # by what lies between the components


@pytest.mark.parametrize("components", [1, 3, 4])
def test_standard_error_is_the_spread_of_repeated_predictions(components: int) -> None:
    model = ibnn.convert(nn.Linear(4, 3), components=components, init_std=0.5, seed=0)
    model.set_posterior(std=0.5)
    x = torch.randn(5, 4)
    repeats = torch.stack([model.predict(x, samples=20, seed=seed).probs for seed in range(1, 201)])
    claimed = torch.stack([model.predict(x, samples=20, seed=seed).standard_error for seed in range(1, 201)])
    # relative standard error of an estimated spread from 200 repeats: 1/√400 = 5 %, so 4 of them
    torch.testing.assert_close(claimed.square().mean(0).sqrt(), repeats.std(0), rtol=0.2, atol=0)


def test_dense_prediction_is_pixelwise() -> None:
    draws = torch.randn(2, 3, 4, 5, 6, 7)  # (K, S, B, C, H, W)
    p = Categorical().summarise(draws)
    assert p.probs.shape == (4, 5, 6, 7)
    assert p.total.shape == p.labels.shape == (4, 6, 7)
    pixel = Categorical().summarise(draws[..., 2, 3])
    for name in ("probs", "total", *SPLIT):
        whole = getattr(p, name)
        torch.testing.assert_close(whole[..., 2, 3], getattr(pixel, name))


def test_bernoulli_is_a_categorical_of_two_classes() -> None:
    draws = torch.randn(2, 3, 4, 5)
    p = Bernoulli().summarise(draws)
    two = Categorical(axis=1).summarise(torch.stack([draws, torch.zeros_like(draws)], 3))
    torch.testing.assert_close(p.probs, two.probs[:, 0])
    for name in SPLIT:
        torch.testing.assert_close(getattr(p, name), getattr(two, name))
    assert torch.equal(p.labels, p.probs > 0.5)
    flat = draws.flatten(0, 1)
    torch.testing.assert_close(Bernoulli().combine(flat).sigmoid(), p.probs)


def test_gaussian_prediction_is_the_mixture_of_its_draws() -> None:
    torch.manual_seed(0)
    draws = torch.cat([2 * torch.randn(3, 4, 5, 2), torch.randn(3, 4, 5, 2)], -1).double()
    p = Gaussian(noise="predicted").summarise(draws)
    means, stds = draws[..., :2].flatten(0, 1), (F.softplus(draws[..., 2:]) + 1e-6).sqrt().flatten(0, 1)
    torch.testing.assert_close(p.mean, means.mean(0))
    torch.testing.assert_close(p.variance, stds.square().mean(0) + means.var(0, correction=0))
    torch.testing.assert_close(p.std, p.variance.sqrt())
    # the quantile inverts the mixture's own CDF
    for level in (0.01, 0.5, 0.9):
        cdf = torch.distributions.Normal(means, stds).cdf(p.quantile(level)).mean(0)
        torch.testing.assert_close(cdf, torch.full_like(cdf, level))
    low, high = p.interval(0.8)
    coverage = (
        torch.distributions.Normal(means, stds).cdf(high) - torch.distributions.Normal(means, stds).cdf(low)
    ).mean(0)
    torch.testing.assert_close(coverage, torch.full_like(coverage, 0.8))
    y = torch.randn(5, 2, dtype=torch.float64)
    expected = torch.distributions.Normal(means, stds).log_prob(y).exp().mean(0).log()
    torch.testing.assert_close(p.log_prob(y), expected)
    assert torch.equal(Gaussian(noise="predicted").combine(draws.flatten(0, 1)), p.draw_means.mean(0))


def test_single_gaussian_interval_is_the_textbook_s() -> None:
    p = Gaussian(init_std=2.0).summarise(torch.full((1, 1, 1, 1), 3.0))
    low, high = p.interval(0.95)
    assert (low.item(), high.item()) == (
        pytest.approx(3 - 1.95996 * 2, abs=1e-3),
        pytest.approx(3 + 1.95996 * 2, abs=1e-3),
    )


def test_half_precision_is_read_in_float32() -> None:
    draws = torch.randn(2, 3, 4, 5)
    p = Categorical().summarise(draws.bfloat16())
    assert p.probs.dtype == torch.float32
    torch.testing.assert_close(p.probs, Categorical().summarise(draws.bfloat16().float()).probs)


def test_scores_are_those_of_the_metrics() -> None:
    draws, target = torch.randn(2, 3, 8, 4, 5), torch.randint(4, (8, 5))
    target[0, 0] = -100
    p = Categorical(axis=1).summarise(draws)
    scores = Categorical(axis=1).score(p, target)
    kept = target != -100
    truth = p.probs.movedim(1, -1)[kept].gather(1, target[kept][:, None])
    assert scores["nll"] == pytest.approx(-truth.log().mean().item(), rel=1e-5)
    assert scores["error"] == pytest.approx((p.labels != target)[kept].double().mean().item())
    y = torch.randint(2, (8, 4))
    b = Bernoulli().summarise(draws[..., 0])
    assert Bernoulli().score(b, y)["nll"] == pytest.approx(F.binary_cross_entropy(b.probs, y.float()).item())
    sure = Bernoulli().summarise(torch.full((7, 1, 2, 1), 40.0))  # where 1 − p is 0 in float32
    assert Bernoulli().score(sure, torch.zeros(2, 1))["nll"] == pytest.approx(40.0)
    assert (sure.probs <= 1).all()
    g = Gaussian().summarise(draws[..., 0])
    expected = -torch.distributions.Normal(g.draw_means, 1.0).log_prob(torch.zeros(8, 4)).exp().mean(0).log().mean()
    scores = Gaussian().score(g, torch.zeros(8, 4))
    assert scores["nll"] == pytest.approx(expected.item(), rel=1e-5)
    assert scores["rmse"] == pytest.approx(g.mean.square().mean().sqrt().item(), rel=1e-5)


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Categorical(label_smoothing=1.0), "`label_smoothing`"),
        (lambda: Gaussian(noise="none"), "`noise`"),  # type: ignore[arg-type]
        (lambda: Gaussian(init_std=0.0), "`init_std`"),
        (lambda: Gaussian().check(torch.zeros(3, 1), torch.zeros(3)), r"of shape \(3, 1\), but got shape \(3,\)"),
        (lambda: Gaussian().check(torch.zeros(3, 1), torch.full((3, 1), math.nan)), "finite"),
        (
            lambda: Gaussian().check(torch.zeros(3, 1), torch.full((3, 1), -1e300, dtype=torch.double)),
            r"`y`.*up to 2e\+18.*float32.*-1e\+300",
        ),
        (lambda: Gaussian(outputs=2).check(torch.zeros(3, 3), torch.zeros(3, 3)), "`outputs`"),
        (
            lambda: Gaussian(noise="predicted").check(torch.zeros(3, 3), torch.zeros(3, 1)),
            "means and as many variances",
        ),
        (lambda: Bernoulli().check(torch.zeros(3, 2), torch.full((3, 2), 2)), r"in \[0, 1\]"),
        (lambda: Bernoulli().check(torch.zeros(3, 2), torch.full((3, 2), math.nan)), r"in \[0, 1\]"),
        (lambda: Gaussian().score(Gaussian().summarise(torch.zeros(1, 1, 3, 1)), torch.zeros(3)), r"of shape \(3, 1\)"),
        (lambda: Categorical().check(torch.zeros(3), torch.zeros(3).long()), "class scores in axis 1"),
        (lambda: Categorical().check(torch.zeros(3, 1), torch.zeros(3).long()), 'got .*3, 1.* likelihood="bernoulli"'),
        (lambda: Categorical().combine(torch.zeros(2, 3, 1)), r'output of shape \(3, 1\).*likelihood="bernoulli"'),
        (lambda: Categorical().summarise(torch.zeros(2, 2, 3, 1)), r'of shape \(3, 1\).*likelihood="bernoulli"'),
        (lambda: Categorical().summarise(torch.zeros(2, 2, 3)), r'of shape \(3,\).*likelihood="bernoulli"'),
        (lambda: Gaussian().summarise(torch.zeros(1, 1, 1, 1)).interval(1.0), "`level`"),
    ],
)
def test_complaints(make: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()  # type: ignore[operator]


def test_integer_regression_targets_are_refused() -> None:
    with pytest.raises(TypeError, match="floating point"):
        Gaussian().check(torch.zeros(3, 1), torch.zeros(3, 1).long())


# ------------------------------------------------------------------------------------------------------- temperature


def test_temperature_divides_logits_and_multiplies_noise() -> None:
    draws, labels = torch.randn(2, 3, 5, 4), torch.randint(4, (5,))
    for likelihood in (Categorical(), Bernoulli()):
        hot = type(likelihood)()
        hot.temperature.fill_(2.5)
        target = labels if isinstance(hot, Categorical) else torch.rand(5, 4).round()
        torch.testing.assert_close(hot.terms(draws[0, 0], target).nll, likelihood.terms(draws[0, 0] / 2.5, target).nll)
        torch.testing.assert_close(hot.combine(draws[0]), likelihood.combine(draws[0] / 2.5))
        for name, value in vars(hot.summarise(draws)).items():
            torch.testing.assert_close(value, getattr(likelihood.summarise(draws / 2.5), name))
    hot, wide = Gaussian(init_std=0.4), Gaussian(init_std=1.0)
    hot.temperature.fill_(2.5)
    target = torch.randn(5, 4)
    torch.testing.assert_close(hot.terms(draws[0, 0], target).nll, wide.terms(draws[0, 0], target).nll)
    torch.testing.assert_close(hot.summarise(draws).aleatoric, wide.summarise(draws).aleatoric)
    predicted = Gaussian(noise="predicted")
    std = predicted.split(draws)[1]
    predicted.temperature.fill_(2.5)
    torch.testing.assert_close(predicted.split(draws)[1], 2.5 * std)


def test_temperature_one_changes_no_bit() -> None:
    logits, labels = 5 * torch.randn(7, 4), torch.randint(4, (7,))
    assert torch.equal(Categorical().terms(logits, labels).nll, F.cross_entropy(logits, labels, reduction="sum") / 7)
    assert torch.equal(Categorical().combine(logits[None]), logits.log_softmax(1))
    assert torch.equal(Gaussian(init_std=0.3).split(logits)[1], Gaussian(init_std=0.3).log_std.exp().expand(7, 4))


@pytest.mark.parametrize(
    ("alias", "kind"),
    [("regression", "Gaussian"), ("normal", "Gaussian"), ("multiclass", "Categorical"), ("binary", "Bernoulli")],
)
def test_usual_names_of_likelihoods(alias: str, kind: str) -> None:
    assert type(ibnn.convert(torch.nn.Linear(2, 2), likelihood=alias).likelihood).__name__ == kind


def test_wrong_targets_are_told_which_likelihood_they_have() -> None:
    with pytest.raises(TypeError, match=r"gaussian.*bernoulli"):
        ibnn.Categorical().check(torch.zeros(4, 3), torch.zeros(4))
    with pytest.raises(ValueError, match="categorical"):
        ibnn.Bernoulli().check(torch.zeros(4, 3), torch.zeros(4))
    with pytest.raises(ValueError, match="reshape"):
        ibnn.Bernoulli().check(torch.zeros(4, 1), torch.zeros(4))


@pytest.mark.parametrize(
    ("output", "centre", "scale", "changed"),
    [
        (torch.randn(400, 1) * 0.3, 1e4, 5e3, True),  # an untrained network
        (torch.randn(400, 1) * 0.3, 0.0, 1e3, True),
        (1e4 + 1.5e3 * torch.randn(400, 1), 1e4, 5e3, False),  # one whose last layer is a change of units
        (torch.full((400, 1), 1e4), 1e4, 1e3, False),
        (torch.randn(400, 1) * 300, 0.0, 1e3, False),
        (torch.randn(400, 1) * 0.3, 0.0, 1.0, False),  # targets of unit size
    ],
)
def test_outputs_in_units_of_their_targets_are_not_standardised_again(
    output: Tensor, centre: float, scale: float, changed: bool
) -> None:
    target = centre + scale * torch.randn(400, 1, generator=torch.Generator().manual_seed(1))
    likelihood = Gaussian()
    likelihood.standardise(output, target)
    expected = (target.mean(), target.std(correction=0)) if changed else (torch.tensor(0.0), torch.tensor(1.0))
    torch.testing.assert_close((likelihood.location[0], likelihood.scale[0]), expected)
    given = Gaussian(location=3.0, scale=2.0)
    given.standardise(output, target)
    assert (given.location.item(), given.scale.item()) == (3.0, 2.0)
