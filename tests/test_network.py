import copy
import os
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import ibnn
from ibnn.latent import Latent
from ibnn.mixture import entropy_bound


def make_net(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), *([nn.BatchNorm1d(7)] if norm else []), nn.ReLU(), nn.Linear(7, 3)]
    return nn.Sequential(*layers)


def make_model(components: int = 4, **options: object) -> ibnn.IBNN:
    return ibnn.convert(make_net(), components=components, seed=0, **options)  # type: ignore[arg-type]


def components_of(model: ibnn.IBNN, rows: int, samples: int = 1, spread: bool = False) -> list[int]:
    """Which component each row draws from, read off draws whose means name their component."""
    probe = copy.deepcopy(model)
    probe.set_posterior(mean=torch.arange(probe.components, dtype=torch.float32)[:, None], std=0.0)
    return training_latents(probe, torch.zeros(rows, 5), samples, spread)[:, 0].int().tolist()


def training_latents(model: ibnn.IBNN, x: Tensor, samples: int = 1, spread: bool = False) -> Tensor:
    """z of the model's next training step, read off its latents during a copy's step."""
    probe, seen = copy.deepcopy(model).train(), []

    def read(*_: object) -> None:
        z = [latent.current()[0] for latent in probe.latents.values()]
        if z[0] is not None:  # not in a run that looks for the batch
            seen.append(torch.cat(z, 1))

    probe.net.register_forward_pre_hook(read)
    probe.elbo(x, torch.zeros(len(x), dtype=torch.long), n_data=100, samples=samples, spread=spread, beta=0.0)
    return seen[0].detach()


# ------------------------------------------------------------------------------------------------------- assignment


@pytest.mark.parametrize("rows", [1, 3, 8, 10, 37])
@pytest.mark.parametrize("components", [1, 4, 8])
def test_rows_are_spread_evenly_and_the_surplus_rotates(rows: int, components: int) -> None:
    model = make_model(components)
    total: Counter[int] = Counter()
    for step in range(1, 4 * components + 1):
        batch = Counter(components_of(model, rows))
        counts = [batch[k] for k in range(components)]
        assert sum(counts) == rows
        assert max(counts) - min(counts) <= 1
        total += batch
        assert max(total[k] for k in range(components)) - min(total[k] for k in range(components)) <= 1, step
        model(torch.randn(rows, 5))


def test_every_example_of_a_repeated_batch_meets_every_component() -> None:
    model = make_model(4)
    met: list[set[int]] = [set() for _ in range(12)]
    for _ in range(60):
        for row, k in enumerate(components_of(model, 12)):
            met[row].add(k)
        model(torch.randn(12, 5))
    assert all(len(seen) == 4 for seen in met)


def test_copies_share_their_component_or_spread_over_all() -> None:
    model = make_model(4)
    model(torch.randn(3, 5))  # start away from zero
    tied = torch.tensor(components_of(model, 6, samples=3)).view(3, 6)
    assert (tied == tied[0]).all()
    spread = torch.tensor(components_of(model, 6, samples=3, spread=True)).view(3, 6)
    assert all(len(set(spread[:, row].tolist())) == 3 for row in range(6))
    counts = Counter(spread.flatten().tolist())
    assert max(counts.values()) - min(counts.values()) <= 1


def test_each_copy_has_its_own_draw() -> None:
    z = training_latents(make_model(2), torch.randn(4, 5), samples=3)
    assert len({tuple(row) for row in z.tolist()}) == 12


# ------------------------------------------------------------------------------------------------ K, B, S invariance


def one_step(model: ibnn.IBNN, x: Tensor, y: Tensor, samples: int = 1, **groups: float) -> None:
    optimiser = torch.optim.SGD(model.parameter_groups(lr=0.1, latent_lr=0.2), momentum=0.9)
    model.elbo(x, y, n_data=100, samples=samples, **groups).loss.backward()
    optimiser.step()


def test_a_component_s_first_update_is_that_of_a_lone_model_on_its_slice() -> None:
    model = make_model(4, kl="components", init_std=0.5).double()
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.randint(3, (12,))
    owner = torch.tensor(components_of(model, 12))
    z = training_latents(model, x)
    before = copy.deepcopy(model)
    one_step(model, x, y)
    for k in range(4):
        # an independent K = 1 loss on the slice, with the same draws, by autograd on the two parameters alone
        lone = ibnn.convert(ibnn.revert(copy.deepcopy(before)), components=1, kl="components").double()
        for name, latent in lone.latents.items():
            latent.mean.data, latent.rho.data = (
                before.latents[name].mean.data[k : k + 1],
                before.latents[name].rho.data[k : k + 1],
            )
        lone = copy.deepcopy(lone)
        rows = owner == k
        noise = (z[rows] - lone.posterior().mean) / lone.posterior().std
        draws = lone.posterior().draw(torch.zeros(int(rows.sum()), dtype=torch.long), noise.detach())
        loss = F.cross_entropy(lone.outputs(x[rows], draws[None])[0], y[rows]) + lone.kl() / 100
        loss.backward()
        for name, latent in lone.latents.items():
            for parameter in ("mean", "rho"):
                start = getattr(before.latents[name], parameter)[k]
                expected = start - 0.2 * getattr(latent, parameter).grad[0]
                torch.testing.assert_close(getattr(model.latents[name], parameter)[k], expected, rtol=1e-9, atol=1e-12)


def test_identical_copies_equal_one_copy() -> None:
    # σ = 0 makes the copies identical; "mean" and "components" KLs would be infinite there, so β = 0
    models = [make_model(4, init_std=0.5) for _ in range(2)]
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    for model, samples in zip(models, (1, 3), strict=True):
        model.set_posterior(std=1e-12)
        one_step(model, x, y, samples=samples, beta=0.0)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pieces", [(4, 4, 4), (8, 4)])
def test_a_batch_equals_the_same_batch_in_pieces(pieces: tuple[int, ...]) -> None:
    """Draws included: they are addressed by example, not by call."""
    whole, parts = make_model(4), make_model(4)
    x, y = torch.randn(12, 5), torch.randint(3, (12,))
    whole.elbo(x, y, n_data=50, samples=2).loss.backward()
    for a, b in zip(x.split(pieces), y.split(pieces), strict=True):
        (parts.elbo(a, b, n_data=50, samples=2).loss * len(a) / 12).backward()
    assert torch.equal(whole.examples, parts.examples)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cut", [1, 5, 7, 11])
def test_named_parts_of_a_batch_equal_the_batch_wherever_it_is_cut(cut: int) -> None:
    whole, parts = make_model(4), make_model(4)
    for model in (whole, parts):
        model.examples.fill_(3)
    x, y = torch.randn(12, 5), torch.randint(3, (12,))
    whole.elbo(x, y, n_data=50, samples=2).loss.backward()
    for rows in (slice(0, cut), slice(cut, 12)):
        terms = parts.elbo(x[rows], y[rows], n_data=50, samples=2, part=(rows.start, 12))
        (terms.loss * len(x[rows]) / 12).backward()
    assert parts.examples == 3
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_the_factor_k_is_in_the_gradient_and_latents_get_no_decay() -> None:
    model = make_model(4)
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    plain = copy.deepcopy(model)
    plain.elbo(x, y, n_data=50).loss.backward()
    groups = {group["name"]: group for group in model.parameter_groups(lr=0.1, latent_lr=0.3, weight_decay=0.01)}
    model.elbo(x, y, n_data=50).loss.backward()
    assert (groups["weights"]["lr"], groups["weights"]["weight_decay"]) == (0.1, 0.01)
    assert (groups["latents"]["lr"], groups["latents"]["weight_decay"]) == (0.3, 0.0)
    assert [len(groups[name]["params"]) for name in ("weights", "latents")] == [4, 4]
    for (name, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad * (4 if "latent" in name else 1))


def test_paper_s_rate_over_k_is_the_same_update() -> None:
    """λ1 on the raw gradient, as the paper has it, equals λ1 / K through parameter_groups."""
    paper, ours = make_model(8), make_model(8)
    x, y = torch.randn(16, 5), torch.randint(3, (16,))
    latents = [p for latent in paper.latents.values() for p in latent.parameters()]
    torch_step = torch.optim.SGD(latents, lr=1.6)
    paper.elbo(x, y, n_data=50).loss.backward()
    torch_step.step()
    optimiser = torch.optim.SGD(ours.parameter_groups(lr=0.0, latent_lr=1.6 / 8))
    ours.elbo(x, y, n_data=50).loss.backward()
    optimiser.step()
    for a, b in zip(paper.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_likelihood_parameters_have_a_group_of_their_own() -> None:
    model = make_model(2, likelihood="gaussian")
    groups = {group["name"]: group for group in model.parameter_groups(lr=0.1, weight_decay=0.5)}
    assert groups["likelihood"]["weight_decay"] == 0.0
    assert groups["likelihood"]["params"][0] is model.likelihood.log_std
    assert groups["latents"]["lr"] == 0.1


# ------------------------------------------------------------------------------------------------------------ losses


def test_elbo_is_the_user_s_own_loop() -> None:
    a, b = make_model(4), make_model(4)
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    terms = a.elbo(x, y, n_data=200, beta=0.5)
    loss = F.cross_entropy(b.train()(x), y) + 0.5 * b.kl() / 200
    assert torch.equal(terms.loss, loss)
    assert torch.equal(terms.kl, b.kl())


def test_gamma_rewards_entropy() -> None:
    model, again = make_model(4), make_model(4)
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    terms = model.elbo(x, y, n_data=200, gamma=3.0)
    plain = again.elbo(x, y, n_data=200)
    torch.testing.assert_close(terms.loss, plain.loss - 3.0 * entropy_bound(model.posterior()) / 200)


def test_kl_is_joint_over_layers() -> None:
    model = make_model(3, init_std=0.5)
    q = ibnn.Mixture(
        torch.cat([latent.mean for latent in model.latents.values()], 1),
        torch.cat([latent.std for latent in model.latents.values()], 1),
    )
    for kind in ("mean", "components", "pairwise"):
        torch.testing.assert_close(model.kl(kind), ibnn.mixture.CLOSED_FORMS[kind](q, 0.3))
    # components tied across layers: the pairwise bound is not the sum of the layers' own bounds
    layers = [ibnn.Mixture(latent.mean, latent.std) for latent in model.latents.values()]
    assert abs(model.kl("pairwise") - sum(ibnn.mixture.kl_pairwise(layer, 0.3) for layer in layers)) > 0.1


def test_montecarlo_kl_changes_with_every_step_and_averages_below_the_pairwise_bound() -> None:
    model = make_model(4, kl="montecarlo", init_std=0.3)
    values = []
    for _ in range(300):
        model.examples.add_(1)
        values.append(model.kl().item())
    estimate = torch.tensor(values)
    assert len(set(values)) == 300
    error = estimate.std() / 300**0.5
    assert estimate.mean() - 4 * error <= model.kl("pairwise")
    assert estimate.mean() + 4 * error >= 0.9 * model.kl("pairwise")  # components this far apart: the bound is tight


def test_initial_posterior_follows_the_method() -> None:
    model = ibnn.convert(nn.Sequential(nn.Linear(2000, 500), nn.Linear(500, 2)), components=4, init_std=0.75, seed=1)
    q = model.posterior()
    n = q.mean.numel()
    assert abs(q.mean.mean() - 1) < 4 * 0.75 / n**0.5
    assert abs(q.mean.std() - 0.75) < 4 * 0.75 / (2 * n) ** 0.5
    assert abs(q.std.mean() - 0.05) < 4 * 0.02 / n**0.5 + 1e-4  # folding |·| at 2.5 sd moves the mean by less than 1e-4
    assert abs(q.std.std() - 0.02) < 4 * 0.02 / (2 * n) ** 0.5 + 2e-4


def test_same_seed_same_model_and_default_seed_follows_torch() -> None:
    net = make_net()
    state = torch.get_rng_state()
    a = ibnn.convert(net)
    torch.set_rng_state(state)
    b = ibnn.convert(net)
    c = ibnn.convert(net)
    assert all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    assert not torch.equal(a.posterior().mean, c.posterior().mean)


# ------------------------------------------------------------------------------------------------------------- draws


def test_draws_are_addressable() -> None:
    model = make_model(3).eval()
    x = torch.randn(6, 5)
    five, two = model.draw_logits(x, samples=5, seed=4), model.draw_logits(x, samples=2, seed=4)
    assert torch.equal(five.view(3, 5, 6, 3)[:, :2], two.view(3, 2, 6, 3))
    torch.testing.assert_close(model.draw_logits(x[2:3], samples=5, seed=4), five[:, 2:3])
    assert not torch.equal(model.draw_logits(x, samples=5, seed=5), five)
    torch.testing.assert_close(model.draw(component=2, index=1, seed=4)(x), five[2 * 5 + 1])


def test_the_noise_of_every_second_component_is_mirrored() -> None:
    model = make_model(5, init_std=0.5).double()
    z, (mean, std) = model.draw_latents(3, seed=4).z.view(5, 3, -1), model.posterior()
    noise = (z - mean[:, None]) / std[:, None]
    torch.testing.assert_close(noise[1::2], -noise[:4:2])
    assert (noise[::2].flatten(0, 1).corrcoef() - torch.eye(9)).abs().max() < 0.99  # no others are
    for k, s in ((0, 2), (3, 1), (4, 0)):  # whatever else is drawn
        assert torch.equal(model.draw_latents(1, seed=4, components=[k], first=s).z[0], z[k, s])


def test_draws_have_the_posterior_s_moments() -> None:
    model = make_model(2, init_std=0.5)
    model.set_posterior(std=0.2)
    z = model.draw_latents(4000, seed=0).z.view(2, 4000, -1)
    q = model.posterior()
    assert ((z.mean(1) - q.mean).abs() < 5 * 0.2 / 4000**0.5).all()
    assert ((z.std(1) - 0.2).abs() < 5 * 0.2 / 8000**0.5).all()


def test_prediction_and_global_generator_leave_each_other_alone() -> None:
    model = make_model(3)
    x = torch.randn(4, 5)
    state = torch.get_rng_state()
    first = model.predict(x).probs
    model.train()(x)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(99)
    assert torch.equal(model.predict(x).probs, first)


def test_state_dict_resumes_the_draws() -> None:
    model = make_model(3)
    x = torch.randn(4, 5)
    model(x)
    other = make_model(3)
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(x), other(x))
    assert not torch.equal(model(x), make_model(3)(x))


def test_eval_forward_is_the_mean_of_its_fixed_draws() -> None:
    model = make_model(3, init_std=0.5).eval()
    x = torch.randn(4, 5)
    assert torch.equal(model(x), model(x))
    expected = model.draw_logits(x, samples=1, seed=0).softmax(-1).mean(0).log()
    torch.testing.assert_close(model(x), expected)
    model.eval_samples, model.eval_seed = 3, 7
    torch.testing.assert_close(model(x), model.draw_logits(x, samples=3, seed=7).softmax(-1).mean(0).log())
    model.eval_samples = 0
    means = torch.stack([model.component(k)(x) for k in range(3)])
    torch.testing.assert_close(model(x), means.softmax(-1).mean(0).log())


def test_component_is_u_diag_mu() -> None:
    model = make_model(3, init_std=0.5)
    plain = model.component(1)
    assert type(plain) is nn.Sequential
    assert not any(isinstance(m, Latent) for m in plain.modules())
    for index, name in ((0, "0"), (2, "2")):
        expected = model.net[index].weight * model.latents[name].mean[1]
        assert torch.equal(plain[index].weight, expected)


@pytest.mark.parametrize("call", [lambda m: m.component(4), lambda m: m.draw(component=-1)])
def test_component_out_of_range(call: object) -> None:
    with pytest.raises(IndexError, match=r"`(k|components)`"):
        call(make_model(4))  # type: ignore[operator]


def test_permuting_components_permutes_draws_and_keeps_the_means_prediction() -> None:
    model = make_model(4, init_std=0.5).eval()
    model.eval_samples = 0
    x = torch.randn(6, 5)
    before = model(x)
    order = torch.tensor([2, 0, 3, 1])
    q = model.posterior()
    model.set_posterior(mean=q.mean[order].clone(), std=q.std[order].clone())
    torch.testing.assert_close(model(x), before)


# ------------------------------------------------------------------------------------------------------- errors


def bad(**changes: object) -> dict[str, object]:
    good = {"x": torch.randn(4, 5), "y": torch.randint(3, (4,)), "n_data": 100}
    return good | changes


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (bad(n_data=3), ValueError, r"`n_data` to be at least the 4 targets"),
        (bad(y=torch.tensor([0, 1, 2, 3])), ValueError, r"`y` to be in 0 … 2 .*labels from 0 to 3"),
        (bad(y=torch.tensor([0, 1, 2, -1])), ValueError, r"labels from -1 to 2"),
        (bad(y=torch.rand(4)), TypeError, r"integer class indices.*float32"),
        (bad(y=torch.randint(3, (3,))), ValueError, r"of 4 rows like x"),
        (bad(y=torch.randint(3, (4, 1))), ValueError, r"of shape \(4,\)"),
        (bad(x=torch.empty(0, 5), y=torch.empty(0, dtype=torch.long)), ValueError, r"at least one row"),
        (bad(x=torch.randn(4, 6)), ValueError, r"layer '0' \(Linear\) gets .* \(rows, 5\), but got shape \(4, 6\)"),
        (bad(x=torch.randn(4)), ValueError, r"of shape \(rows, 5\), but got shape \(4,\)\. Pass a batch"),
        (bad(samples=0), ValueError, r"`samples`"),
        (bad(beta=-1.0), ValueError, r"`beta`"),
        (bad(gamma=float("nan")), ValueError, r"`gamma`"),
    ],
)
def test_elbo_refuses_nonsense_and_draws_for_nothing(
    arguments: dict[str, object], error: type[Exception], match: str
) -> None:
    model = ibnn.convert(make_net(norm=True), components=4, seed=0).train()
    with pytest.raises(error, match=match):
        model.elbo(**arguments)  # type: ignore[arg-type]
    assert int(model.examples) == 0
    assert all(latent.current_pass.z is None for latent in model.latents.values())


def test_reverted_model_says_so() -> None:
    model = make_model()
    ibnn.revert(model)
    with pytest.raises(RuntimeError, match="reverted"):
        model(torch.randn(2, 5))


def test_networks_that_return_something_else() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.fc(x), x

    class Named(Pair):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"logits": self.fc(x)}

    x = torch.randn(2, 5)
    pair = ibnn.convert(Pair(), components=2)
    assert isinstance(pair.train()(x), tuple)  # the user's own loop knows what to do with it
    with pytest.raises(TypeError, match="returns tuple"):
        pair.predict(x)
    assert ibnn.convert(Named(), components=2).predict(x).probs.shape == (2, 3)


class SequenceFirst(nn.Module):
    """Puts the sequence before the batch on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.transpose(0, 1)).transpose(0, 1).mean(1))


@pytest.mark.parametrize("length", [4, 8, 3], ids=["as long as the batch", "a multiple", "another"])
@pytest.mark.parametrize("together", [True, False], ids=["rows", "a row at a time"])
def test_a_batch_that_is_not_first_is_found(length: int, together: bool) -> None:
    net, x = SequenceFirst().double(), torch.randn(4, length, 5, dtype=torch.float64)
    model = ibnn.convert(net, components=2, seed=0).train()
    z = training_latents(model, x)
    output, (inner, head) = model(x), z.split(5, 1)
    if together:
        expected = net.head((net.inner(x * inner[:, None])).mean(1) * head)
    else:
        expected = torch.stack([net.head(net.inner(x[i] * inner[i]).mean(0) * head[i]) for i in range(4)])
    assert torch.allclose(output, expected, rtol=1e-12)
    assert model.latents["inner"].batch_axis == 1


class TwoLayouts(SequenceFirst):
    """Calls a layer once with the batch first and once with the sequence first."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.inner(x).transpose(0, 1)).mean(0))


class NoBatch(SequenceFirst):
    """Calls a layer with something that is the same for all rows."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.inner(torch.ones(8, 5))[0]).mean(1))


@pytest.mark.parametrize("make", [TwoLayouts, NoBatch])
@pytest.mark.parametrize("length", [4, 8], ids=["as long as the batch", "a multiple"])
def test_a_layer_without_a_batch_axis_is_refused(make: type[nn.Module], length: int) -> None:
    model = ibnn.convert(make(), components=2, seed=0).train()
    x = torch.randn(4, length, 5)
    for _ in range(2):  # the second time no longer watched, were the first a success
        with pytest.raises(ValueError, match=r"input of layer 'inner'.*4 rows.*exclude=\['inner'\]"):
            model(x)
    assert model.examples == 0
    assert all(latent.current_pass.z is None for latent in model.latents.values())
    assert model.eval()(x).shape == (4, 3)  # one z for all rows needs no batch axis
    ibnn.convert(make(), components=2, exclude="inner").train()(x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_is_refused_and_not_silently_wrong() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=True))

    model = ibnn.convert(Checkpointed(), components=2, seed=0).train()
    for between in (lambda: None, lambda: model.predict(torch.randn(4, 5, requires_grad=True))):
        loss = model.train()(torch.randn(4, 5, requires_grad=True)).sum()
        between()
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            loss.backward()


def test_threads_do_not_mix_their_draws() -> None:
    model, x = make_model(4), torch.randn(3, 5)
    expected = [model.predict(x, seed=seed).probs for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: model.predict(x, seed=seed % 4).probs, range(80)))
    assert all(torch.equal(probs, expected[number % 4]) for number, probs in enumerate(found))


@pytest.mark.parametrize("where", ["input", "both"])
def test_calls_and_predictions_of_threads_do_not_mix(where: str) -> None:
    net = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 5))
    model = ibnn.convert(net, components=2, where=where, init_std=0.3, seed=0).eval()
    many, few = torch.randn(300, 6), torch.randn(20, 6)  # of many rows the weights are multiplied

    def call(_: int) -> Tensor:
        with torch.no_grad():
            return model(many)

    def answer(_: int) -> Tensor:
        return model.predict(few).probs

    expected = [call(0), call(0), answer(0)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda n: (call, call, answer)[n % 3](n), range(90)))
    assert all(torch.allclose(output, expected[n % 3], atol=1e-5) for n, output in enumerate(found))


def test_wrong_values_are_refused(tmp_path: Path) -> None:
    model, x = make_model(4), torch.randn(3, 5)
    with pytest.raises(ValueError, match="`seed`"):
        model.predict(x, seed=-1)
    p = model.predict(x)
    for target in ([0, 1, 99], [0, -1, 1], [0.5, 1, 1]):
        with pytest.raises(ValueError, match="`target` to be classes"):
            ibnn.abstain(p, target)
    with pytest.raises(TypeError, match="`target`"):
        ibnn.abstain(p, None)
    with pytest.raises(TypeError, match="`model`"):
        ibnn.export(object(), x, tmp_path / "a.onnx")
    with pytest.raises(TypeError, match="`path`"):
        ibnn.export(model, x, 3)  # type: ignore[arg-type]
    state = model.state_dict()
    state["likelihood.temperature"] = torch.tensor(-1.0)
    with pytest.raises(ValueError, match="`temperature`"):
        model.load_state_dict(state)


def test_inputs_may_be_named_tuples() -> None:
    class Pair(NamedTuple):
        a: Tensor
        b: Tensor

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, pair: Pair) -> Tensor:
            return self.head(pair.a + pair.b)

    model, x = ibnn.convert(Added(), components=2, seed=0), torch.randn(6, 4)
    pair, zeros = (Pair(x, torch.zeros(6, 4)),), torch.zeros(6, dtype=torch.long)
    assert torch.equal(model.predict(pair).probs, model.predict((Pair(x / 2, x / 2),)).probs)
    assert torch.isfinite(model.elbo(pair, zeros, n_data=6, samples=2).loss)


def test_wrong_draws_are_refused_in_words() -> None:
    model, x = make_model(2), torch.randn(3, 5)
    for seed in (1.5, 2**63):
        with pytest.raises(ValueError, match="`seed`"):
            model.predict(x, seed=seed)
    for components in ([2], [-1], []):
        with pytest.raises(IndexError, match=r"`components` to be some of 0 … 1, but got .*Count from 0"):
            ibnn.draws(model, x, components=components)


def test_hooks_that_come_later_change_the_input_before_it_is_multiplied() -> None:
    model, x = ibnn.convert(nn.Linear(4, 3), components=2, seed=0, init_std=0.5), torch.randn(30, 4)
    model.net.register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
    assert torch.allclose(ibnn.draws(model, x)[1, 0], model.draw(1)(x), atol=1e-6)


def assign_forward(net: nn.Sequential) -> None:
    net[0].forward = lambda v: nn.functional.linear(v, net[0].weight, net[0].bias)


def replace_layer(net: nn.Sequential) -> None:
    net[0] = nn.Linear(5, 4)


@pytest.mark.parametrize("change", [assign_forward, replace_layer])
def test_layers_that_changed_after_conversion_do_not_lose_their_latents_silently(change: Callable[..., None]) -> None:
    model = ibnn.convert(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), components=2, seed=0)
    change(model.net)
    with pytest.raises(RuntimeError, match=r"\['0'\]"):
        model.predict(torch.randn(3, 5))


def test_a_forward_that_was_assigned_before_conversion_is_what_runs() -> None:
    net, x = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), torch.randn(6, 5)
    net[0].forward = lambda v: 2 * nn.functional.linear(v, net[0].weight)
    model = ibnn.convert(net, components=2, seed=0, copy=False)
    z = model.draw_latents(1).z
    expected = nn.functional.linear(2 * (x * z[0, :5]) @ net[0].weight.T * z[0, 5:], net[1].weight, net[1].bias)
    assert torch.allclose(model.outputs(x, z)[0], expected, atol=1e-6)
    plain = ibnn.revert(model)
    assert torch.allclose(plain[0](x), 2 * x @ net[0].weight.T, atol=1e-6)


@pytest.mark.parametrize("grad", [True, False])
def test_forward_derivatives_are_those_of_the_draws(grad: bool) -> None:
    net = nn.Sequential(nn.Conv1d(6, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    model = ibnn.convert(net, components=2, likelihood="gaussian", seed=0).eval()
    model.parameter_groups(lr=0.1)
    x, v = torch.randn(2, 5, 6, 4, dtype=torch.float64)
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(x, v))).tangent
    expected = (model(x + 1e-6 * v) - model(x - 1e-6 * v)) / 2e-6
    assert torch.allclose(found, expected, atol=1e-7)


def test_models_do_not_share_a_likelihood() -> None:
    likelihood = ibnn.Gaussian()
    a, b = (ibnn.convert(make_net(), likelihood=likelihood) for _ in range(2))
    assert a.likelihood.log_std is not b.likelihood.log_std
    assert ibnn.convert(make_net(), likelihood=likelihood, copy=False).likelihood is likelihood


def test_the_network_by_itself_runs_at_the_mean_once_the_means_have_changed() -> None:
    net, x = make_net(), torch.randn(4, 5)
    model = ibnn.convert(net, components=3, seed=0, init_std=0.5)
    model.predict(x)
    model.set_posterior(std=0.2)  # no mean has changed
    assert torch.equal(model.net(x), net(x))
    model.set_posterior(mean=model.posterior().mean.detach() + 0.1)
    weights = {name: p.clone() for name, p in model.net.named_parameters() if "latent" not in name}
    for name, latent in model.latents.items():  # U diag(z), by hand
        weights[f"{name}.weight"] = weights[f"{name}.weight"] * latent.mean.mean(0)
    expected = torch.func.functional_call(make_net(), weights, x)
    restored = ibnn.convert(net, components=3, seed=1)
    restored.load_state_dict(model.state_dict())
    for each in (model, copy.deepcopy(model), restored):
        torch.testing.assert_close(each.net(x), expected)
    torch.testing.assert_close(model.net(x), model.mean_output(x))


@pytest.mark.parametrize(
    ("name", "hint"), [("fit", "ibnn.fit"), ("calibrate", "ibnn.calibrate"), ("export", "ibnn.export")]
)
def test_functions_of_the_library_are_named_where_they_are_looked_for_on_the_model(name: str, hint: str) -> None:
    model = make_model()
    with pytest.raises(AttributeError, match=hint):
        getattr(model, name)
    assert not hasattr(model, "config")


# ------------------------------------------------------------------------------------------------------- torch.compile


def backend() -> str:
    """torch's own backend, which writes C++, or one without if this machine cannot compile that."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "aot_eager"
    command = [compiler, "-fsyntax-only", "-fopenmp", "-I", sysconfig.get_path("include"), "-x", "c++", "-"]
    done = subprocess.run(command, input=b"#include <Python.h>\n#include <omp.h>\n", capture_output=True)
    return "inductor" if done.returncode == 0 else "aot_eager"


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


COMPILED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), (7, 6)),
    "convolutional": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
        (7, 2, 4, 4),
    ),
    "transformer": (Encoder, (7, 5, 8)),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("call", ["train", "eval", "elbo"])
def test_equal_calls_of_a_compiled_network_are_one_graph(name: str, call: str) -> None:
    """Nothing breaks the graph, and nothing that a call leaves behind makes another one, from a new network on."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    make, shape = COMPILED[name]
    eager = ibnn.convert(make(), components=2, seed=0, init_std=0.3).train(call != "eval")
    model, y = copy.deepcopy(eager), torch.arange(7) % 3

    def run(model: ibnn.IBNN, x: Tensor) -> Tensor:
        return model.elbo(x, y, n_data=50).loss if call == "elbo" else model(x)

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for _ in range(4):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(model, x), run(eager, x))
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(eager.examples, model.examples)
    assert model.fresh == eager.fresh == (call == "eval")


@pytest.mark.slow
@pytest.mark.parametrize("training", [pytest.param(True, id="train"), pytest.param(False, id="eval")])
def test_compiled_forward_gives_the_same_numbers(training: bool) -> None:
    torch._dynamo.reset()
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    eager = ibnn.convert(net, components=3, seed=0, init_std=0.5).train(training)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend=backend())
    for _ in range(2):  # the second step has other draws and must not need another graph
        x = torch.randn(7, 1, 4, 4)
        a, b = eager(x), compiled(x)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        a.square().sum().backward()
        b.square().sum().backward()
    for (name, p), (_, q) in zip(eager.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4, msg=name)
    assert torch.equal(eager.examples, model.examples)


@pytest.mark.slow
@pytest.mark.parametrize("draws", ["channel", "both"])
def test_a_training_step_is_one_graph_that_new_draws_do_not_change(draws: str) -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    net = nn.Sequential(nn.Conv2d(8, 9, 3), nn.BatchNorm2d(9), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    eager = ibnn.convert(net, components=3, seed=0, init_std=0.5, draws=draws).train()
    model = copy.deepcopy(eager)

    def loss(x: Tensor, y: Tensor, beta: float) -> Tensor:
        return model.elbo(x, y, n_data=100, samples=2, beta=beta).loss

    step = torch.compile(loss, fullgraph=True, backend="aot_eager")  # raises where a graph would break
    for number, beta in enumerate((1.0, 1.0, 1.0, 0.5, 0.25, 0.125)):
        x, y = torch.randn(7, 8, 4, 4), torch.randint(3, (7,))
        a, b = eager.elbo(x, y, n_data=100, samples=2, beta=beta).loss, step(x, y, beta)
        torch.testing.assert_close(a, b)
        a.backward()
        b.backward()
        assert counters["stats"]["unique_graphs"] == (1 if number < 3 else 2)  # β is a variable once it has changed
    assert torch.equal(eager.examples, model.examples)
    for (name, p), (_, q) in zip(eager.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_prior_and_gradient_scale_are_numbers_of_the_state() -> None:
    """They stay floats, whatever the dtype; older states without them load strictly and leave them as they are."""
    model, other = (ibnn.convert(nn.Linear(3, 2), components=4, seed=0).half() for _ in range(2))
    model.prior_std = 0.1 + 0.2  # no float32
    model.parameter_groups(0.1)
    state = model.state_dict()
    assert {name: value.dtype for name, value in state.items() if name in ("prior_std", "gradient_scale")} == {
        "prior_std": torch.int64,  # the bits of a double, which every device can hold
        "gradient_scale": torch.int64,
    }
    other.load_state_dict(state)
    assert (other.prior_std, other.gradient_scale) == (0.1 + 0.2, 4.0)
    assert type(other.prior_std) is float
    old = {name: value for name, value in state.items() if name not in ("prior_std", "gradient_scale")}
    other.prior_std = 0.7
    other.load_state_dict(old, strict=True)
    assert (other.prior_std, other.gradient_scale) == (0.7, 4.0)
    inside = nn.ModuleDict({"inner": other})
    inside.load_state_dict({f"inner.{name}": value for name, value in state.items()}, strict=True)
    assert other.prior_std == 0.1 + 0.2
    assert "prior_std" not in dict(model.named_buffers()) | dict(model.named_parameters())
