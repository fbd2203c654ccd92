import pytest
import torch
from torch import nn

import ibnn
from ibnn.baselines import SWAG, Plain
from ibnn.training.averaging import Average, estimate_statistics


def make(value: float = 0.0) -> Plain:
    net = nn.Linear(1, 2)
    for parameter in net.parameters():
        parameter.data.fill_(value)
    return Plain(net)


def test_swa_is_the_mean_and_ema_starts_with_a_small_decay() -> None:
    swa, ema, expected = Average(), Average(), 1.0
    for count, value in enumerate((1.0, 2.0, 6.0), 1):
        swa.update(make(value))
        ema.update(make(value), decay=0.2)
        decay = min(0.2, count / (9 + count))  # 0.1, 0.18, 0.2
        expected = value if count == 1 else decay * expected + (1 - decay) * value
    assert swa.state["net.weight"].flatten().tolist() == pytest.approx([3.0] * 2)
    assert ema.state["net.weight"].flatten().tolist() == pytest.approx([expected] * 2)
    assert swa.count == ema.count == 3
    assert "examples" not in swa.state  # a count is not averaged


def test_numbers_of_the_state_are_not_averaged() -> None:
    average, model = Average(), ibnn.convert(nn.Linear(2, 2), components=2, seed=0)
    for std in (0.1, 0.7):
        model.prior_std = std
        average.update(model)
    assert not {"prior_std", "gradient_scale"} & set(average.state)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert set(average.state) == {name for name, value in tensors.items() if value.is_floating_point()}
    assert average.end_epoch(model, collect=False, last=True)
    assert model.prior_std == 0.7


@pytest.mark.parametrize("last", [False, True])
def test_an_average_takes_the_weights_place_at_the_end_alone(last: bool) -> None:
    model, average = make(1.0), Average()
    model.likelihood.set_temperature(3.0)
    assert not average.end_epoch(model, collect=False, last=last)  # there is none
    assert model.likelihood.temperature == 3
    average.end_epoch(model, collect=True, last=False)
    model.net.weight.data.fill_(5.0)
    assert average.end_epoch(model, collect=True, last=last) == last
    assert model.net.weight[0, 0] == (3.0 if last else 5.0)
    assert model.likelihood.temperature == 3


def test_swag_averages_by_itself_if_it_collects() -> None:
    model, average = SWAG(make().net, rank=2), Average()
    for value in (1.0, 2.0):
        model.net.weight.data.fill_(value)
        assert not average.end_epoch(model, collect=True, last=False)
    assert average.end_epoch(model, collect=False, last=True)
    assert model.net.weight.flatten().tolist() == [1.5, 1.5]
    assert average.state == {}


def test_swag_that_never_collects_keeps_its_weights_and_leaves_averaging_to_fit() -> None:
    model, average = SWAG(make(1.0).net, rank=2), Average()
    assert not average.end_epoch(model, collect=False, last=True)
    assert model.net.weight[0, 0] == 1
    average.update(model, decay=0.9)
    model.net.weight.data.fill_(7.0)
    assert average.end_epoch(model, collect=False, last=True)
    assert model.net.weight[0, 0] == 1


@pytest.mark.parametrize("named", [False, True])
def test_statistics_are_means_over_the_batches(named: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
            return self.head(self.norm(x + shift))

    model = Plain(Net())
    model.examples.fill_(5)
    batches = list(torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0)))
    estimate_statistics(model, ({"x": x, "shift": 1.0} for x in batches) if named else batches)
    shift = 1.0 if named else 0.0
    torch.testing.assert_close(model.net.norm.running_mean, torch.stack(batches).mean((0, 1)) + shift)
    torch.testing.assert_close(model.net.norm.running_var, torch.stack([x.var(0) for x in batches]).mean(0))
    assert (model.net.norm.momentum, int(model.examples)) == (0.1, 5)
