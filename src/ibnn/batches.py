"""DATA IN: what `fit` accepts as data, and the order in which it meets it.

The batches of an epoch are a pure function of (seed, epoch), cut from one order over all workers; a worker computes its
share of each. So the batches are the same for any number of workers, and a run can be taken up at any step.
"""

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from ibnn.errors import complaint
from ibnn.normal import address, words
from ibnn.prediction import Inputs, batch_length, tree_map


class Share(NamedTuple):
    """One worker's part of a batch."""

    x: Inputs
    y: Tensor
    offset: int  # where the part begins in the batch
    total: int  # rows of the whole batch


class Worker(NamedTuple):
    """Which of how many workers this process is."""

    rank: int = 0
    world: int = 1

    def part(self, rows: int) -> slice:
        """This worker's rows of a batch; parts differ by at most one row."""
        return slice(rows * self.rank // self.world, rows * (self.rank + 1) // self.world)


@dataclass(frozen=True)
class Source:
    """Training or validation data of any accepted kind.

    Attributes:
        data: A pair of tensors, a Dataset, or a loader with an order of its own.
        rows: Number of examples.
        batch_size: Rows of a whole batch.
        shuffled: Whether an epoch has a new order.
        drop_last: Whether a last batch that is not full is left out.
        loading: Options for the DataLoader of a Dataset.
    """

    data: Any
    rows: int
    batch_size: int
    shuffled: bool = True
    drop_last: bool = False
    loading: tuple[tuple[str, Any], ...] = ()

    @property
    def steps(self) -> int:
        """Batches an epoch."""
        if isinstance(self.data, DataLoader):
            return len(self.data)
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def epoch(self, seed: int, number: int, *, first: int = 0, worker: Worker | None = None) -> Iterator[Share]:
        """The batches of an epoch from the given one on, as this worker's shares."""
        worker = worker or Worker()
        if isinstance(self.data, DataLoader):
            return self._foreign(first, worker)
        order = torch.arange(self.rows)
        if self.shuffled:
            generator = torch.Generator().manual_seed(int(words(address(seed, number))))
            order = torch.randperm(self.rows, generator=generator)
        batches = [b for b in order.split(self.batch_size) if len(b) == self.batch_size or not self.drop_last]
        batches = [b for b in batches if len(b) >= worker.world]  # no worker goes without
        return self._indexed(batches, first, worker)

    def _indexed(self, batches: list[Tensor], first: int, worker: Worker) -> Iterator[Share]:
        parts = [batch[worker.part(len(batch))] for batch in batches]
        if isinstance(self.data, tuple):
            pairs: Iterable[Any] = (tree_map(lambda t: t[part], self.data) for part in parts[first:])  # noqa: B023
        else:
            options = dict(self.loading)
            skip = first if options.get("num_workers") else 0  # loading processes must go through what was skipped
            loader = DataLoader(self.data, batch_sampler=[p.tolist() for p in parts[first - skip :]], **options)
            pairs = (split_batch(batch) for number, batch in enumerate(loader) if number >= skip)
        for whole, (x, y) in zip(batches[first:], pairs, strict=True):
            yield Share(x, y, worker.part(len(whole)).start, len(whole))

    def _foreign(self, first: int, worker: Worker) -> Iterator[Share]:
        """A loader with an order of its own: every worker goes through it and takes its rows of each batch."""
        for number, batch in enumerate(self.data):
            x, y = split_batch(batch)
            rows = batch_length(x)
            if number >= first and rows >= worker.world:
                part = worker.part(rows)
                cut = tree_map(lambda t: t[part] if t.dim() and len(t) == rows else t, x)  # noqa: B023
                yield Share(cut, y[part], part.start, rows)


def as_source(data: Any, *, batch_size: int, name: str = "train", workers: int = 0, shuffled: bool = True) -> Source:
    """Reads a Dataset, a DataLoader, or a pair (inputs, targets) of tensors or arrays.

    >>> as_source((torch.zeros(10, 2), torch.zeros(10)), batch_size=4).steps
    3
    """
    loading = (("num_workers", workers),)
    if isinstance(data, DataLoader):
        return _from_loader(data, name, shuffled)
    if isinstance(data, tuple | list) and len(data) == 2:
        x, y = _tensors(data[0]), _tensors(data[1])
        if not isinstance(y, Tensor) or batch_length(x) != len(y):
            got = f"{batch_length(x)} inputs and {len(y) if isinstance(y, Sized) else type(y).__name__} targets"
            raise ValueError(complaint(name, "as many inputs as targets", got, "Pass (x, y) of equal length."))
        return Source((x, y), len(y), min(batch_size, len(y)), shuffled)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset) and isinstance(data, Sized):
        if len(data) == 0:
            raise ValueError(complaint(name, "at least one example", "an empty dataset", "Pass data."))
        return Source(data, len(data), min(batch_size, len(data)), shuffled, loading=loading)
    got = type(data).__name__
    raise TypeError(complaint(name, "a Dataset, a DataLoader or a pair (x, y)", got, "Wrap it in a DataLoader."))


def _from_loader(loader: DataLoader[Any], name: str, shuffled: bool) -> Source:
    """Takes a plain loader's dataset and options over; goes through any other loader as it is."""
    plain = type(loader.batch_sampler) is BatchSampler and type(loader.sampler) in (RandomSampler, SequentialSampler)
    if isinstance(loader.dataset, IterableDataset) or not plain or loader.batch_size is None:
        try:
            rows = len(loader.dataset)  # type: ignore[arg-type]
            len(loader)
        except TypeError:
            remedy = "Give the dataset a __len__: KL and schedules need it."
            raise TypeError(complaint(name, "a loader of known length", "one without", remedy)) from None
        return Source(loader, rows, loader.batch_size or 1)
    options = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
    }
    rows = len(loader.dataset)  # type: ignore[arg-type]
    return Source(
        loader.dataset,
        rows,
        min(loader.batch_size, rows),
        shuffled=shuffled and type(loader.sampler) is RandomSampler,
        drop_last=loader.drop_last and rows >= loader.batch_size,
        loading=tuple(options.items()),
    )


def split_batch(batch: Any) -> tuple[Inputs, Tensor]:
    """Inputs and targets of a loader's batch: (x, y), (x1, x2, …, y), or a dict with "labels"."""
    if isinstance(batch, dict) and isinstance(batch.get("labels"), Tensor):
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    if isinstance(batch, tuple | list) and len(batch) >= 2 and isinstance(batch[-1], Tensor):
        return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]
    got = f"a {type(batch).__name__}"
    raise TypeError(complaint("batch", 'a pair (x, y) or a dict with "labels"', got, "Set the loader's collate_fn."))


def _tensors(tree: Any) -> Any:
    """Arrays as tensors, float64 arrays as float32; containers of them likewise."""
    if isinstance(tree, Tensor):
        return tree
    if isinstance(tree, dict):
        return {key: _tensors(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(_tensors(value) for value in tree)
    if hasattr(tree, "__array__"):
        tensor = torch.as_tensor(tree)
        return tensor.float() if tensor.dtype == torch.float64 else tensor
    return tree
