"""Everything that is measured of a trained classifier, against slow and direct computation."""

import pytest
import torch
from torch import nn

from ibnn import metrics
from ibnn.baselines import Plain
from ibnn.convert import convert
from ibnn.data import KINDS, DataSet, Images, Split, corrupt
from ibnn.lab.evaluation import SEVERITIES, evaluate
from ibnn.network import IBNN
from ibnn.novelty import fit_novelty, measure

MEAN, STD = (0.4,), (0.3,)


@pytest.fixture(scope="module")
def whole() -> DataSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (300, 1, 6, 6), generator=generator, dtype=torch.uint8)
    return DataSet(
        "made",
        Split(images, images[:, 0, 0, 0].long() % 4),
        Split(images, images[:, 0, 0, 0].long() % 4),
        MEAN,
        STD,
        tuple("abcd"),
        True,
    )


def make_model() -> Plain:
    torch.manual_seed(0)
    return Plain(nn.Sequential(nn.Flatten(), nn.Linear(36, 4)))


def probs(model: Plain, x: torch.Tensor) -> torch.Tensor:
    return model.net((x - MEAN[0]) / STD[0]).softmax(1).detach()


def test_numbers_are_those_of_direct_computation(whole: DataSet) -> None:
    model = make_model().eval()
    found = evaluate(model, whole, None, shifted=280)
    images, labels = whole.test.images.float() / 255, whole.test.labels  # type: ignore[union-attr]
    clean = probs(model, images)
    assert found.result["scores"]["ece"] == pytest.approx(metrics.ece(clean, labels))
    assert found.result["scores"]["brier"] == pytest.approx(metrics.brier(clean, labels))
    part = images[:280]
    blurred = torch.cat([probs(model, corrupt(part, "blur", severity)) for severity in SEVERITIES])
    assert found.result["corrupted"]["blur"]["error"] == pytest.approx(metrics.error(blurred, labels[:280].repeat(3)))
    worst = torch.cat(
        [probs(model, corrupt(part, kind, 5)) for kind in ("noise", "blur", "contrast", "rotation", "pixelate")]
    )
    auroc = metrics.auroc(1 - clean.amax(1), 1 - worst.amax(1))
    assert found.result["outsiders"]["corrupted 5"]["max_prob"] == pytest.approx(auroc, abs=1e-4)
    assert "tempered" not in found.result


def test_both_temperatures_are_measured_and_the_own_one_is_left(whole: DataSet) -> None:
    model = convert(make_model().net, components=2, prior_std=0.5)
    model.likelihood.temperature.fill_(0.7)
    valid = Images(whole.train, mean=MEAN, std=STD)
    found = evaluate(model, whole, valid, samples=3, shifted=20).result
    assert found["temperature"] == pytest.approx(0.7)
    assert model.likelihood.temperature.item() == pytest.approx(0.7)
    best = found["tempered"]["temperature"]
    x = whole.normalise(whole.train.images)  # type: ignore[union-attr]
    draws = model.draw_logits(x, 3, 0).detach()
    nll = {t: metrics.nll((draws / t).softmax(-1).mean(0).log(), whole.train.labels) for t in (0.7, best)}
    assert nll[best] <= nll[0.7]
    assert found["tempered"]["scores"]["nll"] == pytest.approx(nll[best], abs=1e-5)  # here the same images


def test_shown_images_are_the_extremes(whole: DataSet) -> None:
    model = convert(make_model().net, components=2, prior_std=0.5)
    answers = evaluate(model, whole, None, samples=3, shifted=20).answers
    total = answers["aleatoric"] + answers["between"] + answers["within"]
    rows = answers["shown/rows"]
    assert total[rows[0]] == total.max()
    assert total[rows[-1]] == total.min()
    assert torch.equal(answers["shown/images"], whole.test.images[rows])  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def knowing(whole: DataSet) -> IBNN:
    """A network with reference images."""
    model = convert(make_model().net, components=2, prior_std=0.5)
    x = whole.normalise(whole.train.images)  # type: ignore[union-attr]
    fit_novelty(model, (x[:150], whole.train.labels[:150]), (x[150:], whole.train.labels[150:]))
    return model


def test_novelty_is_that_of_predict(whole: DataSet, knowing: IBNN) -> None:
    found = evaluate(knowing, whole, None, samples=3, shifted=40)
    x = whole.normalise(whole.test.images)  # type: ignore[union-attr]
    expected = knowing.predict(x, samples=3, batch_size=250)
    assert expected.p_value is not None
    torch.testing.assert_close(found.answers["p_value"], expected.p_value)
    torch.testing.assert_close(found.answers["probs"], expected.probs)
    assert found.result["scores"]["nll"] == pytest.approx(metrics.nll(expected.log_probs, whole.test.labels), abs=1e-5)
    worst = torch.cat([corrupt(whole.test.images[:40].float() / 255, kind, 5) for kind in KINDS])  # type: ignore[union-attr]
    p, score = (
        torch.cat(parts) for parts in zip(*(measure(knowing, (w - 0.4) / 0.3) for w in worst.split(40)), strict=True)
    )
    test = {level: float((expected.p_value <= float(level)).double().mean()) for level in ("0.01", "0.05")}
    shares = {level: float((p <= float(level)).double().mean()) for level in ("0.01", "0.05")}
    assert found.result["novelty"] == {
        "test": pytest.approx(test, abs=1e-5),
        "corrupted 5": pytest.approx(shares, abs=1e-5),
    }
    assert 0 < test["0.05"] < 1
    auroc = metrics.auroc(measure(knowing, x).score, score)
    assert found.result["outsiders"]["corrupted 5"]["novelty"] == pytest.approx(auroc, abs=1e-3)


def test_the_fallback_is_that_of_predict(whole: DataSet, knowing: IBNN) -> None:
    found = evaluate(knowing, whole, None, samples=3, fallback=0.2, shifted=40)
    x = whole.normalise(whole.test.images)  # type: ignore[union-attr]
    expected = knowing.predict(x, samples=3, batch_size=250, fallback=0.2)
    torch.testing.assert_close(found.answers["probs"], expected.probs)
    assert not torch.allclose(expected.probs, knowing.predict(x, samples=3).probs)
    with pytest.raises(ValueError, match="fallback"):
        evaluate(make_model(), whole, None, fallback=0.2)


def test_without_a_reference_nothing_is_said_of_novelty(whole: DataSet) -> None:
    found = evaluate(make_model(), whole, None, shifted=20)
    assert "novelty" not in found.result
    assert "novelty" not in found.result["outsiders"]["corrupted 5"]
    assert not [name for name in found.answers if "novel" in name or "p_value" in name]
