"""What `calibrate` costs, and the draws that it searches with."""

import math
from typing import Any

import pytest
import torch
from test_calibration import SequenceFirst, crossed_rows, problem, quick
from torch import Tensor, nn

import ibnn
from ibnn.calibration import Calibration, _Outputs, calibrate
from ibnn.progress import Bar


def counted(model: ibnn.IBNN, x: Tensor, y: Tensor) -> tuple[int, Calibration]:
    """Rows that go through the network."""
    rows: list[int] = []
    with model.net.register_forward_pre_hook(lambda _, args: rows.append(len(args[0]))):
        report = calibrate(model, (x, y))
    return sum(rows), report


@pytest.mark.parametrize(
    ("rows", "components", "trained"),
    [
        (150, 8, False),
        (1000, 8, False),
        (1000, 4, True),
        pytest.param(5000, 8, False, marks=pytest.mark.slow),
        pytest.param(1000, 8, True, marks=pytest.mark.slow),
    ],
)
def test_sixty_passes(rows: int, components: int, trained: bool) -> None:
    net, x, y = problem(rows)
    model = ibnn.convert(net, components=components, seed=0)
    model.examples.fill_(1000 if trained else 0)
    passed, report = counted(model, x, y)
    novelty = 2 * rows + 3 * 256 + 16  # what layers see
    came = (5 + 1) * components * rows if trained else 0  # the network as it came, and without noise
    assert passed <= 60 * max(rows, 1000) + came + rows + novelty
    assert 0 <= passed - report.passes * rows <= novelty
    assert report.after["nll"] <= report.temperature_scaling["nll"]


@pytest.mark.slow
@pytest.mark.parametrize("draws", ["channel", "unit", "both"])
@pytest.mark.parametrize("name", ["lenet", "resnet"])
def test_convolutions(name: str, draws: Any) -> None:
    torch.manual_seed(0)
    net: nn.Module = ibnn.nets.LeNet() if name == "lenet" else ibnn.nets.CifarResNet(depth=20, width=0.25)
    x = torch.randn(300, *((1, 28, 28) if name == "lenet" else (3, 8, 8)))
    model = ibnn.convert(net.eval(), components=8, seed=0, draws=draws)
    passed, report = counted(model, x, torch.randint(10, (300,)))
    assert passed <= 62 * 1000
    wide = [name for name, layer in net.named_modules() if isinstance(layer, nn.Conv2d) and layer.in_channels >= 5]
    assert list(report.unit_std) == ([] if draws == "channel" else wide)


def test_the_gain_is_the_paired_difference() -> None:
    net, x, y = problem(600, 5)
    model, report = quick(net, x, y, samples=2)
    assert report.scale > 0
    assert report.gain[0] == pytest.approx(report.cross_nll[0] - report.cross_nll[1])
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain, noisy = (crossed_rows(d, y[order]) for d in (net(x[order])[None], model.draw_logits(x[order], 2)))
    error = (plain - noisy).std().item() / math.sqrt(600)
    assert report.gain[1] == pytest.approx(error, rel=0.05)  # the grid's temperatures are coarser
    assert f"gains {100 * report.gain[0] / report.cross_nll[0]:.1f} ±" in str(report)


def outputs_of(model: ibnn.IBNN, x: Tensor) -> _Outputs:
    options: Any = {"samples": 5, "seed": 0, "batch_size": 32, "bar": Bar("", shown=False)}
    outputs = _Outputs(model, x, torch.zeros(len(x)), **options)
    outputs.order = torch.arange(len(x))
    return outputs


def test_draws_of_the_search_have_the_moments_of_the_noise() -> None:
    """A linear network's output is N(w·x, a²·Σ(w x)²); mirror images average to w·x."""
    net, x = nn.Linear(4, 1, bias=False), torch.randn(500, 4)
    with torch.no_grad():
        outputs = outputs_of(ibnn.convert(net, components=2, seed=0).eval(), x)
        drawn, plain = outputs.mirrored(0.3)[0], net(x)  # (J, N, 1)
        pairs = drawn.unflatten(0, (-1, 2))
        torch.testing.assert_close(pairs.mean(1), plain.expand(len(pairs), -1, -1), rtol=1e-4, atol=1e-5)
        squared = (pairs[:, 0] - plain).square() / (0.3 * net.weight * x).square().sum(1, keepdim=True)  # χ², 1 dof
    assert squared.mean().item() == pytest.approx(1, abs=4 * math.sqrt(2 / squared.numel()))
    assert (drawn[0, :-1] - plain[:-1] != drawn[0, 1:] - plain[1:]).all()


@pytest.mark.parametrize("batch_first", [True, False])
def test_rows_have_their_own_draws_whatever_the_batch(batch_first: bool) -> None:
    net, x, _ = problem(60)
    model = ibnn.convert(net if batch_first else SequenceFirst(), components=2, seed=0).eval()
    with torch.no_grad():
        whole, part = outputs_of(model, x).mirrored(0.3)[0], outputs_of(model, x[:7]).mirrored(0.3)[0]
    torch.testing.assert_close(part, whole[:, :7], rtol=1e-4, atol=1e-5)


class Anchored(nn.Module):
    """Compares inputs with points that a layer makes of parameters, without seeing the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.embed, self.last = nn.Parameter(torch.randn(4, 6)), nn.Linear(6, 6), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 4 * self.last(x @ self.embed(self.points).T)
        return out


def test_layers_that_do_not_see_the_batch_share_draws() -> None:
    _, x, y = problem(100)
    model, report = quick(Anchored(), x, y)
    assert report.after["nll"] < report.before["nll"]
    prediction = model.predict(x)
    assert model.likelihood.score(prediction, y) == pytest.approx(report.after, abs=1e-4)
