"""A bank of samples is a posterior like the mixture: its draws are addressed, folded, saved, exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ibnn
from ibnn.files.answering import Answering

K, SAMPLES = 3, 7


def banked() -> tuple[ibnn.IBNN, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    model = ibnn.convert(net, components=K, seed=0).eval()
    bank = 1 + 0.3 * torch.randn(K, SAMPLES, model.nodes)
    model.set_bank(bank)
    return model, bank, torch.randn(5, 1, 4, 4)


def test_draws_are_the_samples_each_once() -> None:
    model, bank, _ = banked()
    drawn = model.draw_latents(SAMPLES, seed=3).z.view(K, SAMPLES, -1)
    for k in range(K):
        assert not torch.equal(drawn[k], bank[k])  # another order
        assert torch.equal(drawn[k].sum(1).sort().values, bank[k].sum(1).sort().values)
    more = model.draw_latents(2 * SAMPLES, seed=3).z.view(K, 2 * SAMPLES, -1)
    assert torch.equal(more[:, SAMPLES:], drawn)  # they begin again
    assert torch.equal(model.draw_latents(2, seed=3, components=[2], first=4).z, drawn[2, 4:6])
    assert not torch.equal(model.draw_latents(SAMPLES, seed=4).z.view(K, SAMPLES, -1), drawn)


def test_a_draw_is_a_plain_network() -> None:
    model, _, x = banked()
    rows = model.draw_logits(x, 4, seed=2)
    for k, s in ((0, 0), (2, 3)):
        net = model.draw(k, s, seed=2)
        assert not any("latent" in name for name, _ in net.named_modules())
        assert torch.allclose(net(x), rows[k * 4 + s], atol=1e-5)
    torch.testing.assert_close(ibnn.draws(model, x, samples=4, seed=2).flatten(0, 1), rows)  # in other batches
    answer: Any = model.predict(x, samples=4, seed=2)
    assert torch.allclose(answer.probs, rows.softmax(-1).mean(0), atol=1e-6)
    assert torch.allclose(answer.epistemic, answer.between + answer.within)


def test_components_have_the_moments_of_chains_and_back() -> None:
    model, bank, x = banked()
    q = model.posterior()
    assert torch.allclose(q.mean, bank.mean(1))
    assert torch.allclose(q.std, bank.std(1, correction=0), atol=1e-6)
    assert torch.allclose(model.component(1)(x), model.outputs(x, bank[1].mean(0)[None])[0], atol=1e-5)
    model.set_posterior()
    assert model.bank is None
    assert torch.allclose(model.posterior().mean, bank.mean(1))
    drawn = model.draw_latents(2000).z.view(K, 2000, -1)
    assert ((drawn.mean(1) - bank.mean(1)).abs() < 4.5 * q.std / 2000**0.5).all()
    model.set_bank(drawn)
    assert torch.allclose(model.posterior().mean, drawn.mean(1))


@pytest.mark.parametrize("latents_only", [False, True])
def test_a_bank_is_saved_and_loaded(latents_only: bool, tmp_path: Path) -> None:
    model, bank, x = banked()
    expected: Any = model.predict(x)
    net = ibnn.revert(model)
    model, *_ = banked()
    model.save_pretrained(tmp_path, latents_only=latents_only)
    loaded = ibnn.load(tmp_path, net)
    assert loaded.bank is not None
    assert torch.equal(loaded.bank, bank)
    found: Any = loaded.predict(x)
    assert torch.equal(found.probs, expected.probs)


def test_a_state_brings_its_bank_or_none() -> None:
    model, bank, _ = banked()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert torch.equal(state["bank"], bank)
    other = banked()[0]
    other.set_posterior(mean=1.0)
    assert "bank" not in other.state_dict()
    other.load_state_dict(state)
    assert torch.equal(other.draw_latents(3).z, model.draw_latents(3).z)
    model.set_posterior(mean=1.0)
    other.load_state_dict(model.state_dict())
    assert other.bank is None


def test_files_are_traced_from_the_bank() -> None:
    model, _, x = banked()
    expected: Any = model.predict(x, samples=4, seed=1)
    answering = Answering(model, 4, 1, None, novelty=False).eval()
    answering.find_batch(x)
    assert torch.allclose(answering(x)["probabilities"], expected.probs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["torch", "onnx"])
def test_a_bank_is_exported(format: Any, tmp_path: Path) -> None:
    model, _, x = banked()
    written = ibnn.export(model, x, tmp_path / "model", samples=SAMPLES, seed=1, format=format)
    assert written.difference < 1e-4  # to `predict`, on the example
    assert written.draw_bytes == 4 * K * SAMPLES * model.nodes


@pytest.mark.slow
def test_compiled_draws_are_the_same() -> None:
    model, _, x = banked()
    model.eval_samples = 3
    traced = torch.export.export(model, (x,), strict=False).module()
    assert torch.allclose(traced(x), model(x), atol=1e-5)


def test_training_and_calibration_ask_for_a_mixture() -> None:
    model, _, x = banked()
    y = torch.randint(3, (5,))
    with pytest.raises(ValueError, match=r"mixture.*set_posterior\(\)"):
        model.elbo(x, y, n_data=5)
    with pytest.raises(ValueError, match="mixture"):
        model.train()(x)
    with pytest.raises(ValueError, match="mixture"):
        ibnn.calibrate(model, (x, y))


def test_banks_that_do_not_fit() -> None:
    model, bank, _ = banked()
    for wrong in (bank[:2], bank[:, :, 1:], bank[:, :0], bank[0]):
        with pytest.raises(ValueError, match="`z`"):
            model.set_bank(wrong)
    with pytest.raises(ValueError, match="finite"):
        model.set_bank(bank * float("nan"))
    assert model.bank is not None
    assert torch.equal(model.bank, bank)
