"""Chains of whole networks against closed forms, numerical integration and each other."""

import contextlib
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ibnn
from ibnn.errors import DamagedError
from ibnn.sampling import Samples, effective_size

CHAINS, S = 24, 0.5  # many short chains: a step costs nearly the same for one


def linear(chains: int = CHAINS) -> tuple[ibnn.IBNN, tuple[Tensor, Tensor]]:
    """Bayesian linear regression: one layer, fixed weights, known noise; inputs are correlated."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, -0.4], [0.0, 0.0, 0.7]])
    x = torch.randn(60, 3, generator=generator) @ mixing
    net = nn.Linear(3, 1)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.5, -0.8, 0.3]]))
        net.bias.zero_()
    y = x @ torch.tensor([[0.6], [-0.5], [0.3]]) + 0.7 * torch.randn(60, 1, generator=generator)
    model = ibnn.convert(net, components=chains, prior_std=S, likelihood=ibnn.Gaussian(init_std=0.7), seed=0)
    return model.eval(), (x, y)


def closed_form(model: ibnn.IBNN, x: Tensor, y: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Mean and covariance of p(z | data)^(1/T): precision (AᵀA/σ² + I/s²)/T with A = x ∘ w."""
    net: Any = model.net
    design = x.double() * net.weight.detach().double()
    precision = design.T @ design / 0.7**2 + torch.eye(3).double() / S**2
    right = design.T @ (y.double()[:, 0] - net.bias.detach().double()) / 0.7**2 + 1 / S**2
    return torch.linalg.solve(precision, right), temperature * torch.linalg.inv(precision)


def assert_moments(z: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Means, variances and correlations within four Monte Carlo standard errors."""
    worth, std = effective_size(z), covariance.diagonal().sqrt()
    rows = z.double().flatten(0, 1)
    assert ((rows.mean(0) - mean).abs() < 4 * std / worth.sqrt()).all()
    squares = effective_size((z.double() - mean).square())
    assert (((rows - mean).square().mean(0) / std**2 - 1).abs() < 4 * (2 / squares).sqrt()).all()
    apart = (torch.corrcoef(rows.T) - covariance / std / std[:, None]).abs()
    assert (apart < 4 / squares.min().sqrt()).all()


def test_linear_regression_has_its_closed_form() -> None:
    model, data = linear()
    found = ibnn.sample(model, data, samples=40, warmup=60, progress=False)
    assert_moments(found.z, *closed_form(model, *data))
    assert found.rhat.max() < 1.2


@pytest.mark.parametrize("temperature", [0.1, pytest.param(4.0, marks=pytest.mark.slow)])
def test_variance_grows_with_the_temperature(temperature: float) -> None:
    model, data = linear()
    found = ibnn.sample(model, data, samples=40, warmup=60, temperature=temperature, progress=False)
    assert_moments(found.z, *closed_form(model, *data, temperature=temperature))


def test_logistic_regression_has_the_integrated_posterior() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 2, generator=generator)
    y = (x[:, 0] - 0.5 * x[:, 1] + 0.5 * torch.randn(40, generator=generator) > 0).long()
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-1.0, 0.7], [0.8, -0.9]]))
    model = ibnn.convert(net, components=CHAINS, prior_std=0.8, seed=0).eval()
    axis = torch.linspace(-3, 5, 161, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    logits = (x.double() * grid[:, None]) @ net.weight.detach().double().T + net.bias.detach().double()  # (G, N, 2)
    log = logits.log_softmax(-1)[:, torch.arange(40), y].sum(1) - 0.5 * ((grid - 1) / 0.8).square().sum(1)
    weight = log.softmax(0)
    mean = weight @ grid
    covariance = (grid - mean).T @ ((grid - mean) * weight[:, None])
    found = ibnn.sample(model, (x, y), samples=40, warmup=60, progress=False)
    assert_moments(found.z, mean, covariance)
    probs = (weight[:, None, None] * logits.softmax(-1)).sum(0)
    answer: Any = model.predict(x, samples=40)
    assert (answer.probs - probs).abs().max() < 4 * 0.2 / math.sqrt(found.ess.min())


def two_layers(chains: int = 4) -> tuple[ibnn.IBNN, tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(50, 2)
    return ibnn.convert(net, components=chains, prior_std=0.5, seed=0).eval(), (x, (x[:, 0] * x[:, 1] > 0).long())


# ------------------------------------------------------------------------------------------------- the whole function


def quick(model: ibnn.IBNN, data: Any, **options: Any) -> Samples:
    return ibnn.sample(model, data, **{"samples": 6, "warmup": 20, "thin": 2, "progress": False} | options)


def test_an_interrupted_chain_goes_on_to_the_bit(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ibnn.sampling.hmc import Moves

    options: Any = {"samples": 8, "seed": 5}
    model, data = two_layers()
    expected = quick(model, data, **options)
    advance, model = Moves.advance, two_layers()[0]
    for stop in (7, 26):  # in the warm-up, and among samples

        def stopping(self: Moves, state: Any, stop: int = stop) -> Any:
            if int(state.at) == stop:
                raise KeyboardInterrupt
            return advance(self, state)

        monkeypatch.setattr(Moves, "advance", stopping)
        torch.manual_seed(stop)  # no part of it
        with pytest.raises(KeyboardInterrupt):
            quick(model, data, run_dir=tmp_path, **options)
        assert model.bank is None
    monkeypatch.setattr(Moves, "advance", advance)
    found = quick(model, data, run_dir=tmp_path, **options)
    assert torch.equal(found.z, expected.z)
    assert torch.equal(found.energy, expected.energy)
    assert found.step_size == expected.step_size
    assert found.acceptance == expected.acceptance
    again = quick(two_layers()[0], data, run_dir=tmp_path, **options)  # it has ended: nothing is computed
    assert torch.equal(again.z, expected.z)
    assert again.seconds == found.seconds


def test_no_sample_is_lost_wherever_a_run_is_interrupted(tmp_path: Any) -> None:
    """Interrupts the loop at each line that it runs during two steps that are kept, and resumes."""
    options: Any = {"samples": 4, "warmup": 10, "thin": 1}
    data = two_layers(2)[1]
    expected = quick(two_layers(2)[0], data, **options)
    for count in range(1, 20):
        with (lines := _Lines(count)), contextlib.suppress(KeyboardInterrupt):
            quick(two_layers(2)[0], data, run_dir=tmp_path / str(count), **options)
        assert lines.line > 0
        found = quick(two_layers(2)[0], data, run_dir=tmp_path / str(count), **options)
        assert torch.equal(found.z, expected.z), f"interrupted at line {lines.line}"
        assert torch.equal(found.energy, expected.energy), f"interrupted at line {lines.line}"


class _Lines:
    """Raises KeyboardInterrupt at a line that the loop's `run` is about to execute, by its number after the warm-up."""

    def __init__(self, count: int) -> None:
        self.count, self.line = count, 0

    def __enter__(self) -> "_Lines":
        self.before = sys.gettrace()
        sys.settrace(self.enter)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self.before)

    def enter(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        return self.step if code.co_name == "run" and code.co_filename.endswith("sampling/loop.py") else None

    def step(self, frame: Any, event: str, _: Any) -> Any:
        self.count -= event == "line" and int(frame.f_locals["self"].state.at) >= 10  # after the warm-up
        if self.count == 0:
            self.line = frame.f_lineno
            raise KeyboardInterrupt
        return self.step


@pytest.mark.parametrize("place", [0.3, 0.6, 0.9])
def test_a_changed_bit_of_the_chains_is_noticed(place: float, tmp_path: Any) -> None:
    model, data = two_layers()
    quick(model, data, run_dir=tmp_path)
    file = tmp_path / "chains.safetensors"
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 4
    file.write_bytes(content)
    with pytest.raises(DamagedError):
        quick(model, data, run_dir=tmp_path)


def test_a_finished_run_is_not_written_again(tmp_path: Any) -> None:
    model, data = two_layers()
    found = quick(model, data, run_dir=tmp_path)
    before = (tmp_path / "chains.safetensors").stat()
    again = quick(two_layers()[0], data, run_dir=tmp_path)
    assert torch.equal(again.z, found.z)
    assert (tmp_path / "chains.safetensors").stat() == before


def test_a_folder_of_other_chains_is_refused(tmp_path: Any) -> None:
    model, data = two_layers()
    quick(model, data, run_dir=tmp_path, seed=1)
    with pytest.raises(ValueError, match=r"run_dir.*seed = 1"):
        quick(model, data, run_dir=tmp_path, seed=2)
    for other in ((data[0], 1 - data[1]), (data[0] + 1, data[1])):  # as many rows of other targets, or inputs
        with pytest.raises(ValueError, match=r"run_dir.*data"):
            quick(model, other, run_dir=tmp_path, seed=1)
    with torch.no_grad():
        next(model.net.parameters()).mul_(2)
    with pytest.raises(ValueError, match=r"run_dir.*weights"):
        quick(model, data, run_dir=tmp_path, seed=1)
    (tmp_path / "chains.safetensors").write_bytes(b"nothing")
    with pytest.raises(DamagedError):
        quick(model, data, run_dir=tmp_path, seed=1)


def test_thinning_keeps_every_third() -> None:
    model, data = two_layers()
    every = quick(model, data, samples=12, thin=1)
    kept = quick(two_layers()[0], data, samples=4, thin=3)
    assert torch.equal(kept.z, every.z[:, 2::3])
    assert torch.equal(kept.energy, every.energy[:, 2::3])


def test_a_dataset_gives_the_chain_of_its_tensors() -> None:
    model, (x, y) = two_layers()
    found = quick(model, (x, y))
    again = quick(two_layers()[0], torch.utils.data.TensorDataset(x, y))
    assert torch.equal(found.z, again.z)


def test_chains_apart_give_what_chains_together_give() -> None:
    """Rows of one batch, or a pass for each chain: the same energy and gradient."""
    from ibnn.batches import as_source
    from ibnn.sampling.hmc import Energy

    model, data = two_layers()
    energy = Energy(model, as_source(data, batch_size=50), 2.0, 0)
    z = model.draw_latents(1).z.detach()
    potential, gradient = energy(z)
    mean, same = energy(z, each=False)
    assert torch.allclose(gradient, same, rtol=1e-4, atol=1e-4)
    assert torch.allclose(potential.mean(), mean[0])
    for k in (0, 3):
        at = z[k].clone().requires_grad_()
        loss = nn.functional.cross_entropy(model.outputs(data[0], at[None])[0], data[1], reduction="sum")
        loss = (loss + ((at - 1) / 0.5).square().sum() / 2) / 2.0
        loss.backward()
        assert potential[k].item() == pytest.approx(loss.item(), rel=1e-5)
        assert at.grad is not None
        assert torch.allclose(gradient[k], at.grad, rtol=1e-4, atol=1e-4)


def test_the_energy_is_free_of_class_weights_and_smoothing() -> None:
    """−U is Σ log p(y | x, z) + log N(z; 1, s²), however the weights were trained."""
    from ibnn.batches import as_source
    from ibnn.sampling.hmc import Energy

    trained = ibnn.Categorical(weight=torch.tensor([0.1, 5.0, 1.0]), label_smoothing=0.2)
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    model = ibnn.convert(nn.Linear(4, 3), components=2, likelihood=trained, prior_std=S, seed=0).eval()
    energy = Energy(model, as_source((x, y), batch_size=20), 1.0, 0)
    z = model.draw_latents(1).z.detach().requires_grad_()
    net: Any = model.net
    outputs = [nn.functional.linear(x * own, net.weight, net.bias).detach() for own in z]
    prior = 0.5 * ((z - 1) / S).square().sum(1)
    log_p = [nn.functional.cross_entropy(output, y, reduction="sum") for output in outputs]
    torch.testing.assert_close(energy(z)[0], (prior + torch.stack(log_p)).detach())
    assert trained.label_smoothing == 0.2
    assert trained.weight is not None


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"samples": 2}, "samples"),
        ({"temperature": 0.0}, "temperature"),
        ({"warmup": 3}, "warmup"),
        ({"seed": -1}, "seed"),
    ],
)
def test_settings_that_make_no_sense(options: dict[str, Any], name: str) -> None:
    model, data = two_layers()
    with pytest.raises(ValueError, match=f"`{name}`"):
        quick(model, data, **options)
    assert model.bank is None


def test_an_option_that_does_not_exist() -> None:
    model, data = two_layers()
    with pytest.raises(TypeError, match="burnin"):
        quick(model, data, burnin=5)


def test_models_that_cannot_be_sampled() -> None:
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    with pytest.raises(TypeError, match="Convert it first"):
        ibnn.sample(nn.Linear(3, 2), (x, y))  # type: ignore[arg-type]
    norm = ibnn.convert(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), components=2, seed=0)
    with pytest.raises(ValueError, match=r"BatchNorm.*'1'.*model.eval\(\)"):
        ibnn.sample(norm.train(), (x, y))
    quick(norm.eval(), (x, y))


def test_units_are_one_in_the_chains_and_in_the_bank() -> None:
    """A convolutional network as `convert` makes it: the chains of one without factors of units, and its draws."""
    torch.manual_seed(0)
    x, y, found = torch.randn(30, 8, 5), torch.randint(2, (30,)), []
    net = nn.Sequential(nn.Conv1d(8, 2, 3), nn.Flatten(), nn.Linear(6, 2))
    for options in ({}, {"draws": "channel"}):
        model = ibnn.convert(net, components=2, seed=0, **options).eval()
        found.append((model, quick(model, (x, y))))
    (model, chains), (plain, expected) = found
    assert bool(model.unit_std.any())
    assert torch.equal(chains.z, expected.z)
    assert torch.equal(model.draw_logits(x, 3), plain.draw_logits(x, 3))
    assert torch.allclose(model.draw(1, 2)(x), model.draw_logits(x, 3)[5], atol=1e-5)
    assert not any("unit" in name for name, _ in model.draw(1, 2).named_modules())
    model.set_posterior()  # the mixture of the moments has its factors of units again
    assert not torch.allclose(model.draw_logits(x, 3), plain.draw_logits(x, 3))
    model.set_bank(chains.z)
    again = ibnn.convert(net, components=2, seed=1).eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.draw_logits(x, 3), plain.draw_logits(x, 3))


def test_data_that_cannot_be_sampled_from() -> None:
    model, (x, y) = two_layers()
    with pytest.raises(ValueError, match="two rows or more"):
        quick(model, (x[:1], y[:1]))
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 50, 50)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10, sampler=sampler)
    with pytest.raises(TypeError, match="`data`"):
        quick(model, loader)
    wrong = y.clone()
    wrong[40] = 2
    with pytest.raises(ValueError, match="`y`"):
        quick(model, (x, wrong))


def test_a_chain_that_diverges_says_so() -> None:
    model, data = two_layers()
    before = model.posterior().mean.clone()
    x, y = data
    with pytest.raises(ibnn.DivergedChainError, match=r"energy of chain .*step 0"):
        quick(model, (x * float("inf"), y))
    assert model.bank is None
    assert torch.equal(model.posterior().mean, before)


def test_trajectories_that_diverge_are_rejected_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from ibnn.sampling import hmc

    def far(state: hmc.State, *_: Any) -> hmc.State:
        return state._replace(step=torch.tensor(1e6).double(), dual=torch.tensor([0.0, 0.0, math.log(1e6), 0.0]))

    monkeypatch.setattr(hmc, "_averaged", far)
    model, data = two_layers()
    found = quick(model, data, warmup=10)
    assert found.divergent == 12 * 4
    assert found.acceptance == 0.0
    assert (found.z[:, :1] == found.z).all()
