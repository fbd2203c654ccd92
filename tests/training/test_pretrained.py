from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ibnn
from ibnn import fit
from ibnn.training import steering


def blobs(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (rows,), generator=generator)
    return torch.randn(rows, 6, generator=generator) + 1.2 * nn.functional.one_hot(y, 6), y


TRAIN, VALID = blobs(200, 1), blobs(200, 2)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    """Trained until it fits its few examples."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(TRAIN[0]), TRAIN[1]).backward()
        optimiser.step()
    return net.eval()


def run(net: nn.Module, **options: Any) -> tuple[ibnn.IBNN, ibnn.History]:
    model = ibnn.convert(net, components=4, seed=0)
    return model, fit(model, TRAIN, VALID, recipe="pretrained", quiet=True, **options)


def nll(model: ibnn.IBNN) -> float:
    return model.likelihood.score(model.predict(VALID[0]), VALID[1])["nll"]


@pytest.mark.slow
def test_it_starts_from_what_calibrate_finds(net: nn.Module) -> None:
    """Without steps worth the name the result is the calibrated network's; its noise is where the steering begins."""
    calibrated = ibnn.convert(net, components=4, seed=0)
    report = ibnn.calibrate(calibrated, VALID)
    calibrated.set_posterior(std=calibrated.posterior().std.clamp_min(1e-3))
    model, _ = run(net, steps=1, lr=1e-12, latent_lr=0.0)
    torch.testing.assert_close(model.posterior().std, calibrated.posterior().std, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.posterior().mean, torch.ones_like(model.posterior().mean))
    assert model.prior_std == max(report.scale, steering.MIN_STD)
    x = VALID[0]
    torch.testing.assert_close(model.draw_logits(x), calibrated.draw_logits(x), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_it_improves_on_the_trained_network(net: nn.Module) -> None:
    plain = ibnn.convert(net, components=4, seed=0)
    plain.set_posterior(mean=1.0, std=0.0)
    model, history = run(net, epochs=20)
    assert nll(model) < nll(plain) - 0.1
    assert len(history.looks) >= steering.MIN_LOOKS


@pytest.mark.parametrize("frozen", [True, False])
def test_batchnorm_statistics_are_kept_and_its_weights_trained(net: nn.Module, frozen: bool) -> None:
    model, _ = run(net, epochs=2, freeze_batchnorm=frozen, calibrate=False)
    before, after = net[1], model.net[1]
    assert torch.equal(before.running_mean, after.running_mean) is frozen
    assert torch.equal(before.running_var, after.running_var) is frozen
    assert not torch.equal(before.weight, after.weight)


def test_trained_latents_are_not_calibrated_again(net: nn.Module) -> None:
    model = ibnn.convert(net, components=4, seed=0)
    fit(model, TRAIN, beta=1.0, steps=3, quiet=True)
    std = model.posterior().std.detach().clone()
    fit(model, TRAIN, VALID, recipe="pretrained", steps=1, lr=1e-12, latent_lr=0.0, quiet=True)
    torch.testing.assert_close(model.posterior().std, std)


@pytest.mark.parametrize("beta", ["auto", pytest.param(1.0, marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_with_the_same_bits(net: nn.Module, tmp_path: Path, beta: Any) -> None:
    options: dict[str, Any] = {"epochs": 4, "evaluate_every": 1, "beta": beta}
    whole, expected = run(net, **options)

    class Stop(Exception):
        pass

    def stop(row: dict[str, Any], model: ibnn.IBNN) -> None:
        if row["epoch"] == 2:
            raise Stop

    with pytest.raises(Stop):
        run(net, **options, run_dir=tmp_path, callbacks=[stop])
    model, history = run(net, **options, run_dir=tmp_path)
    assert model.prior_std == whole.prior_std
    assert history.looks == expected.looks
    for name, value in whole.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_held_out_data_are_asked_for_before_anything_is_touched(net: nn.Module, tmp_path: Path) -> None:
    model = ibnn.convert(net, seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"Expected `valid` to be held-out data to calibrate by"):
        fit(model, TRAIN, recipe="pretrained", run_dir=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_noise_that_was_switched_off_can_be_trained(net: nn.Module) -> None:
    """σ = 0, which `calibrate` may choose, is ρ = −∞: its KL is infinite and its gradient is not a number."""
    model = ibnn.convert(net, components=4, seed=0)
    model.set_posterior(std=torch.tensor([0.0, 0.1, 0.2, 0.3])[:, None])
    history = fit(model, TRAIN, beta=1.0, steps=1, lr=1e-12, latent_lr=1e-12, quiet=True)
    assert history.stopped == "finished"
    expected = torch.tensor([steering.LEAST_STD, 0.1, 0.2, 0.3])[:, None].expand_as(model.posterior().std)
    torch.testing.assert_close(model.posterior().std, expected)
