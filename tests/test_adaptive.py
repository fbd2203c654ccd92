"""A level that adapts covers in the long run, whatever the stream does."""

import math

import pytest
import torch
from torch import Tensor

import ibnn
from ibnn.baselines import Plain


def hits(distances: Tensor, stream: Tensor, adaptive: ibnn.AdaptiveLevel, delay: int = 0) -> Tensor:
    """Which distances of a stream are within the limit of held-out ones, with targets that come `delay` steps late."""
    held = ibnn.prediction.Conformal(distances.view(-1, 1, 1, 1), torch.zeros(len(distances), 1, 1, dtype=torch.int64))
    found = torch.zeros(len(stream), dtype=torch.bool)
    for step, distance in enumerate(stream):
        found[step] = distance <= held.limits(distances.view(-1, 1, 1), adaptive.level).item()
        if step >= delay:
            adaptive.update(found[step - delay : step - delay + 1])
    adaptive.update(found[len(stream) - delay :])
    return found


@pytest.mark.parametrize("delay", [0, 30])
@pytest.mark.parametrize("scale", [0.1, 3.0, 100.0])
def test_long_run_coverage_after_a_break(delay: int, scale: float) -> None:
    """The bound holds for every stream; a fixed level misses by far more."""
    generator, steps, rate = torch.Generator().manual_seed(0), 1500, 0.03
    distances = torch.randn(200, generator=generator).abs()
    stream = torch.randn(steps, generator=generator).abs()
    stream[steps // 3 :] *= scale
    adaptive = ibnn.AdaptiveLevel(0.9, rate=rate)
    found = hits(distances, stream, adaptive, delay).double()
    assert adaptive.coverage == pytest.approx(float(found.mean()))
    assert abs(adaptive.coverage - 0.9) <= (1 + rate * (delay + 1)) / (rate * steps)
    assert abs(float(found[-750:].mean()) - 0.9) <= 2 * (1 + rate * (delay + 1)) / (rate * 750)
    fixed = (stream <= distances.sort().values[math.ceil(201 * 0.9) - 1]).double().mean()
    assert abs(adaptive.coverage - 0.9) < abs(float(fixed) - 0.9)


def test_without_targets_the_level_is_fixed() -> None:
    adaptive = ibnn.AdaptiveLevel(0.8)
    adaptive.update(torch.zeros(0, dtype=torch.bool))
    assert adaptive.level == 0.8
    assert math.isnan(adaptive.coverage)


def test_levels_at_the_ends_give_all_or_nothing() -> None:
    x, y = torch.randn(50, 4), torch.randint(4, (50,))
    model = Plain(torch.nn.Linear(4, 4))
    ibnn.conformalize(model, (x, y))
    adaptive = ibnn.AdaptiveLevel(0.9, rate=0.5)
    adaptive.update([False])
    assert adaptive.level == 1.0
    assert model.predict(x).set(adaptive.level).all()
    adaptive.update([True] * 40)
    assert adaptive.level == 0.0
    assert not model.predict(x).set(adaptive.level).any()


def test_counts_are_all_there_is_and_wrong_arguments_are_refused() -> None:
    adaptive, again = ibnn.AdaptiveLevel(0.7, rate=0.02), ibnn.AdaptiveLevel(0.7, rate=0.02)
    adaptive.update([True, False, True])
    again.seen, again.covered = adaptive.seen, adaptive.covered
    assert (again.level, again.coverage) == (adaptive.level, adaptive.coverage)
    with pytest.raises(ValueError, match="target"):
        ibnn.AdaptiveLevel(1.0)
    with pytest.raises(ValueError, match="rate"):
        ibnn.AdaptiveLevel(0.9, rate=0.0)
    with pytest.raises(ValueError, match="covered"):
        adaptive.update(torch.ones(3))
    for covered in (None, "a", object(), [None], {}):
        with pytest.raises(TypeError, match="`covered`"):
            adaptive.update(covered)
    for wrong in (None, "a", [0.9], torch.tensor(0.9)):
        with pytest.raises(ValueError, match="`target`"):
            ibnn.AdaptiveLevel(wrong)
        with pytest.raises(ValueError, match="`rate`"):
            ibnn.AdaptiveLevel(0.9, rate=wrong)
