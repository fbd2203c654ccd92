from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ibnn.batches import Source, Worker, as_source
from ibnn.data import Images, Split

X, Y = torch.arange(23.0)[:, None], torch.arange(23)


def rows(source: Source, number: int = 0, **options: object) -> list[list[int]]:
    return [share.y.tolist() for share in source.epoch(0, number, **options)]  # type: ignore[arg-type]


KINDS = {
    "tensors": (X, Y),
    "arrays": (X.double().numpy(), Y.numpy()),
    "dataset": TensorDataset(X, Y),
    "loader": DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True),
    "dict": ({"a": X, "b": X + 1}, Y),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_batches(kind: str) -> None:
    source, reference = as_source(KINDS[kind], batch_size=5), as_source((X, Y), batch_size=5)
    assert source.steps == 5
    assert rows(source) == rows(reference)
    assert sorted(chain.from_iterable(rows(source))) == list(range(23))
    assert rows(source, 0) != rows(source, 1)
    for share in source.epoch(0, 0):
        inputs = share.x["a"] if isinstance(share.x, dict) else share.x
        assert inputs.dtype == torch.float32
        assert inputs.flatten().tolist() == share.y.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_can_be_taken_up_anywhere(kind: str) -> None:
    source = as_source(KINDS[kind], batch_size=5)
    assert rows(source, first=3) == rows(source)[3:]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_workers_cut_the_same_batches(world: int) -> None:
    source = as_source((X, Y), batch_size=5)
    whole = [batch for batch in rows(source) if len(batch) >= world]  # the last batch has 3 rows
    shares = [list(source.epoch(0, 0, worker=Worker(rank, world))) for rank in range(world)]
    for number, batch in enumerate(whole):
        parts = [shares[rank][number] for rank in range(world)]
        assert list(chain.from_iterable(part.y.tolist() for part in parts)) == batch
        assert all(part.total == len(batch) and batch[part.offset] == part.y[0] for part in parts)
        assert max(len(part.y) for part in parts) - min(len(part.y) for part in parts) <= 1
    assert all(len(share) == len(whole) for share in shares)


def test_unshuffled_and_drop_last_loaders_stay_so() -> None:
    source = as_source(DataLoader(TensorDataset(X, Y), batch_size=5, drop_last=True), batch_size=99)
    assert rows(source) == [list(range(start, start + 5)) for start in range(0, 20, 5)]
    assert source.steps == 4


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler(torch.ones(23).tolist(), 23),
        SubsetRandomSampler(range(11)),
        RandomSampler(range(23), replacement=True, num_samples=13),
    ],
    ids=["weighted", "subset", "replacement"],
)
def test_a_sampler_of_the_user_s_own_decides_the_rows(sampler: Any) -> None:
    source = as_source(DataLoader(TensorDataset(X, Y), batch_size=5, sampler=sampler), batch_size=99)
    assert (source.rows, source.steps) == (len(sampler), -(-len(sampler) // 5))
    whole = rows(source)
    assert list(map(len, whole)) == [5] * (len(sampler) // 5) + [len(sampler) % 5]
    torch.manual_seed(99)
    assert rows(source) == whole  # a function of seed and epoch alone
    assert rows(source, 1) != whole
    assert rows(source, first=2) == whole[2:]
    halves = [[share.y.tolist() for share in source.epoch(0, 0, worker=Worker(rank, 2))] for rank in (0, 1)]
    assert [a + b for a, b in zip(*halves, strict=True)] == [batch for batch in whole if len(batch) > 1]
    if isinstance(sampler, SubsetRandomSampler):
        assert sorted(chain.from_iterable(whole)) == list(range(11))


def test_loading_processes_give_the_same_batches() -> None:
    source = as_source(TensorDataset(X, Y), batch_size=5, workers=1)
    assert rows(source, first=3) == rows(as_source((X, Y), batch_size=5))[3:]


class Endless(IterableDataset[int]):
    def __iter__(self) -> object:  # type: ignore[override]
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        ((X, Y[:3]), ValueError, "`train` to be as many inputs as targets, but got 23 inputs and 3 targets"),
        (X, TypeError, r"a Dataset, a DataLoader or a pair \(x, y\), but got Tensor"),
        (TensorDataset(X[:0], Y[:0]), ValueError, "an empty dataset"),
        (DataLoader(Endless()), TypeError, "a loader of known length"),
    ],
)
def test_bad_data(data: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        as_source(data, batch_size=5)


def test_bad_batches_are_named() -> None:
    with pytest.raises(TypeError, match="a pair"):
        rows(as_source(DataLoader(np.zeros((4, 2), dtype=np.float32), batch_size=2), batch_size=2))  # type: ignore[arg-type]


def test_a_dataset_that_makes_whole_batches_is_not_collated() -> None:
    """`Images` does; augmentation follows the seed of the step, so the number of a batch decides it."""
    generator = torch.Generator().manual_seed(0)
    split = Split(torch.randint(256, (10, 1, 6, 6), generator=generator, dtype=torch.uint8), torch.arange(10))
    images = Images(split, mean=(0.5,), std=(0.25,))
    source = as_source(images, batch_size=4)
    shares = list(source.epoch(0, 0))
    assert [len(share.y) for share in shares] == [4, 4, 2]
    for share in shares:
        torch.testing.assert_close(share.x, images.__getitems__(share.y.tolist())[0])
    part, rest = source.split(3, seed=0)
    assert sorted(y for s in (part, rest) for share in s.epoch(0, 0) for y in share.y.tolist()) == list(range(10))
