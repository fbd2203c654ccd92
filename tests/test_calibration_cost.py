"""What `calibrate` costs, and what it says of answers from fewer draws than they will have."""

import math
from typing import Any

import pytest
import torch
from test_calibration import SequenceFirst, crossed_rows, problem, quick
from torch import Tensor, nn

import ibnn
from ibnn.calibration import Calibration, calibrate, profile, search
from ibnn.calibration.few import Completed, FewDraws
from ibnn.calibration.outputs import Outputs
from ibnn.likelihood import Categorical


def counted(model: ibnn.IBNN, x: Tensor, y: Tensor, **options: Any) -> tuple[int, Calibration]:
    """Rows that go through the network, those with a gradient three times."""
    rows: list[int] = []

    def count(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows.append(len(args[0]) * (3 if torch.is_grad_enabled() else 1))

    with model.net.register_forward_pre_hook(count):
        report = calibrate(model, (x, y), **options)
    return sum(rows), report


@pytest.mark.parametrize(
    ("rows", "components", "draws", "trained"),
    [
        (150, 8, "channel", False),
        (1000, 8, "channel", False),
        (1000, 4, "channel", True),
        pytest.param(5000, 8, "channel", False, marks=pytest.mark.slow),
        pytest.param(1000, 16, "channel", False, marks=pytest.mark.slow),
        pytest.param(1000, 8, "channel", True, marks=pytest.mark.slow),
    ],
)
def test_forty_passes(rows: int, components: int, draws: Any, trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "STEPS", 100)
    net, x, y = problem(rows)
    model = ibnn.convert(net, components=components, seed=0, draws=draws)
    model.examples.fill_(1000 if trained else 0)
    passed, report = counted(model, x, y)
    assert passed <= 40 * max(rows, 1000)
    assert 0 <= passed - report.passes * rows <= rows + 3 * 256 + 16  # what layers see, for novelty
    assert report.after["nll"] <= report.temperature_scaling["nll"]


@pytest.mark.slow
@pytest.mark.parametrize("draws", ["channel", "unit", "both"])
@pytest.mark.parametrize("name", ["lenet", "resnet"])
def test_forty_passes_of_convolutions(name: str, draws: Any) -> None:
    torch.manual_seed(0)
    net: nn.Module = ibnn.nets.LeNet() if name == "lenet" else ibnn.nets.CifarResNet(depth=20, width=0.25)
    x = torch.randn(1000, *((1, 28, 28) if name == "lenet" else (3, 8, 8)))
    model = ibnn.convert(net.eval(), components=8, seed=0, draws=draws)
    passed, report = counted(model, x, torch.randint(10, (1000,)))
    assert passed <= 40 * 1000
    wide = [name for name, layer in net.named_modules() if isinstance(layer, nn.Conv2d) and layer.in_channels >= 5]
    assert list(report.unit_profile) == ([] if draws == "channel" else wide)


def test_the_loss_of_many_draws_is_foreseen_from_few() -> None:
    """Of a lognormal probability with a small spread: bias c / J, c half of its squared variation."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.stack([0.8 * torch.randn(64, 4000, generator=generator), torch.zeros(64, 4000)], -1)[None]
    y = torch.zeros(4000, dtype=torch.int64)
    plain = Categorical()
    nll = {n: plain.losses(logits[:, :n], y, 1.0)[0].mean().item() for n in (8, 64)}
    assert nll[8] > nll[64] + 0.008
    few, counts = FewDraws(plain, 64).losses(logits[:, :8], y, 1.0)
    assert few.mean().item() == pytest.approx(nll[64], abs=0.4 * (nll[8] - nll[64]))
    assert int(counts.sum()) == 4000
    repeated = logits[:, torch.arange(64) % 8]
    repeated[:, :, :1000] = logits[:, :, :1000]
    found = Completed(plain, 64, 8).losses(repeated, y, 1.0)[0]
    torch.testing.assert_close(found[:1000], plain.losses(logits[:, :, :1000], y[:1000], 1.0)[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1000:], few[1000:], rtol=1e-5, atol=1e-6)


def test_answers_of_few_draws_are_scored_as_predict_answers() -> None:
    """Too many rows for all draws of each: where draws disagree all are made, so that scores are nearly those."""
    net, x, y = problem(1200, 3)
    model, report = quick(net, x, y, components=8)
    assert report.scale > 0
    found = model.likelihood.score(model.predict(x), y)
    assert found["nll"] == pytest.approx(report.after["nll"], abs=0.03)  # few nodes, much noise: 8 draws differ by 0.02
    assert found["nll"] <= report.temperature_scaling["nll"]


def test_the_gain_is_the_paired_difference() -> None:
    net, x, y = problem(200, 5)
    model, report = quick(net, x, y, samples=2)
    assert report.gain[0] == pytest.approx(report.cross_nll[0] - report.cross_nll[1])
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain, noisy = (crossed_rows(d, y[order]) for d in (net(x[order])[None], model.draw_logits(x[order], 2)))
    error = (plain - noisy).std().item() / math.sqrt(200)
    assert report.gain[1] == pytest.approx(error, rel=0.05)  # the grid's temperatures are coarser
    assert f"gains {100 * report.gain[0] / report.cross_nll[0]:.1f} ±" in str(report)


@pytest.mark.parametrize("own", [True, False])
def test_rows_have_draws_of_their_own_in_opposite_pairs(own: bool) -> None:
    net, x, y = problem(60)
    model = ibnn.convert(net if own else SequenceFirst(), components=2, seed=0)
    outputs = Outputs(model, x, samples=5, seed=0, batch_size=256)
    model.eval()
    with torch.no_grad():
        search._Search(outputs, y, temper=True, profile=False)._find_rows(outputs.flat)
        drawn = outputs.noisy(outputs.flat, 0.3, outputs.everything, 4)[0]
        same = outputs.noisy(outputs.flat, 0.3, torch.tensor([7, 3]), 4)[0]
    assert outputs.by_row  # also where layers see the batch elsewhere
    torch.testing.assert_close(same, drawn[:, [7, 3]], rtol=1e-4, atol=1e-5)
    middle, plain = (drawn[0] + drawn[1]) / 2, outputs.model.outputs(x, outputs.mean[:1])[0]
    assert (middle - plain).abs().mean() < 0.6 * (drawn[0] - plain).abs().mean()
