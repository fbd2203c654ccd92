import logging
from pathlib import Path

import pytest
import torch

from ibnn.training import session as checkpoint


def save(folder: Path, step: int) -> Path:
    return checkpoint.save(folder, step, {"a/b": torch.full((3,), step)}, {"step": step, "list": [0.1]})


def test_round_trip_and_newest_wins(tmp_path: Path) -> None:
    save(tmp_path, 9)
    save(tmp_path, 10)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.facts == {"step": 10, "list": [0.1]}
    assert torch.equal(found.tensors["a/b"], torch.full((3,), 10))


def test_only_the_last_few_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        save(tmp_path, step)
    assert [path.name[:14] for path in sorted(tmp_path.iterdir())] == ["step-000000003", "step-000000004"]


def test_new_ones_outlive_damaged_ones_of_later_steps(tmp_path: Path) -> None:
    for step in (7, 8):
        save(tmp_path, step).write_bytes(b"")
    assert checkpoint.latest(tmp_path) is None
    for step in (1, 2, 3):
        assert save(tmp_path, step).exists()
        found = checkpoint.latest(tmp_path)
        assert found is not None
        assert found.facts["step"] == step
    assert [path.stem for path in checkpoint.paths(tmp_path)] == ["step-000000002", "step-000000003"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_one_is_named_and_the_one_before_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[-1] ^= 1
    path.write_bytes(content[: {"truncate": len(content) // 2, "flip": len(content), "empty": 0}[damage]])
    with caplog.at_level(logging.WARNING, logger="ibnn"):
        found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.facts["step"] == 1
    assert path.name in caplog.text


def test_none_where_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("make", [lambda p: torch.optim.AdamW(p), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_optimisers_go_on_exactly(make: object) -> None:
    def parameters() -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]

    def step(optimiser: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> None:
        for p in params:
            p.grad = p.detach() * 0.3
        optimiser.step()

    first = parameters()
    one = make(first)  # type: ignore[operator]
    step(one, first)
    tensors, data = checkpoint.pack_optimiser(one, "o"), one.state_dict()["param_groups"]
    second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    two = make(second)  # type: ignore[operator]
    checkpoint.unpack_optimiser(two, "o", {name: tensor.clone() for name, tensor in tensors.items()}, data)
    step(one, first)
    step(two, second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
