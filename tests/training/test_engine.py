from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from ibnn import Recipe
from ibnn.training.engine import Engine


def test_one_worker_sums_its_own_and_is_the_main_one() -> None:
    engine = Engine(Recipe(), None, rows=3)
    try:
        assert (engine.worker, engine.main, engine.device.type) == ((0, 1), True, engine.accelerator.device.type)
        assert engine.total((1.0, 2.0)) == engine.total([1.0, 2.0], for_main=True) == [1.0, 2.0]
        assert engine.highest(15) == 15
        inputs = engine.to_device({"x": torch.ones(2), "others": (torch.zeros(1), 3)})
        assert inputs["x"].device.type == engine.device.type
        optimiser = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        _, steppers = engine.prepare(nn.Linear(1, 1), [optimiser])
        assert steppers == [optimiser] or engine.device.type != "cpu"  # without accelerate's wrapper
    finally:
        engine.close()


def test_the_state_is_given_back_if_it_was_made_here() -> None:
    Engine(Recipe(), None, rows=3).close()
    assert not AcceleratorState._shared_state
    Accelerator()
    try:
        Engine(Recipe(), None, rows=3).close()
        assert AcceleratorState._shared_state
        with pytest.raises(ValueError, match="mixed_precision='bf16'"):
            Engine(Recipe(precision="bf16"), None, rows=3)
    finally:
        AcceleratorState._reset_state()


def test_what_cannot_run_leaves_no_state_behind() -> None:
    with pytest.raises(ValueError, match="`run_dir` to be a folder when there are trackers"):
        Engine(Recipe(trackers=("tensorboard",)), None, rows=3)
    with pytest.raises(ValueError, match="`train` to be at least a row for each worker, but got 0"):
        Engine(Recipe(), None, rows=0)
    assert not AcceleratorState._shared_state


def test_rows_go_to_trackers_without_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = Engine(Recipe(), tmp_path, rows=3), []
    monkeypatch.setattr(engine.accelerator, "log", lambda values, step: seen.append((values, step)))
    engine.log({"step": 7, "loss": 0.5})
    engine.close()
    assert seen == [({"loss": 0.5}, 7)]
