import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_loop_learns() -> None:
    result = load("own_loop").main(epochs=5)
    assert result["error"] < 0.2
    assert result["nll"] < 0.7
    assert result["epistemic"] > 0


@pytest.mark.filterwarnings("ignore")  # lightning's own
def test_lightning_module_learns() -> None:
    pytest.importorskip("lightning")
    result = load("lightning_module").main(epochs=5)
    assert result["valid_nll"] < 0.7


@pytest.mark.slow
def test_the_trainer_of_transformers_learns() -> None:
    pytest.importorskip("transformers")
    from accelerate.state import AcceleratorState

    try:
        result = load("hf_trainer").main(epochs=6)
    finally:
        AcceleratorState._reset_state()  # the Trainer leaves it behind, with a precision that others may not want
    assert result["nll"] < 1.3  # chance: 2.3
    assert result["eval_loss"] == pytest.approx(result["nll"], abs=0.1)  # from one draw a component, not five
    assert result["epistemic"] > 0
