"""Reads what `fit` accepts as data, and decides in which order it is trained on.

The batches of an epoch are a pure function of (seed, epoch), cut from one order for all workers; each worker computes
its share of every batch. So the batches are the same for any number of workers, and a run can be resumed at any step.
"""

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map as map_trees
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data.sampler import BatchSampler, RandomSampler, SequentialSampler

from ibnn.errors import complaint
from ibnn.generators import generators_restored, seed_generators
from ibnn.inputs import Inputs, as_tensors, batch_length, slice_rows, split_inputs, tensors, tree_map
from ibnn.normal import numbered_seed

SAMPLED = 64  # rows in a fingerprint, and rows and columns that data sets are compared by
Pack = Callable[[Any], Tensor]  # makes one tensor of the targets of a batch, as `Likelihood.pack`


class Share(NamedTuple):
    """One worker's part of a batch."""

    x: Inputs
    y: Tensor
    offset: int  # number of the part's first row in the batch
    total: int  # rows of the whole batch

    def pieces(self, count: int) -> Iterator["Share"]:
        """Cuts the part into at most `count` pieces of nearly equal length."""
        rows = batch_length(self.x)
        count = min(count, rows)
        for number in range(count):
            part = Worker(number, count).part(rows)
            yield Share(slice_rows(self.x, part, rows), self.y[part], self.offset + part.start, self.total)


class Worker(NamedTuple):
    """The rank of this process among all workers."""

    rank: int = 0
    world: int = 1

    def part(self, rows: int) -> slice:
        """Returns this worker's rows of a batch; parts differ by at most one row."""
        return slice(rows * self.rank // self.world, rows * (self.rank + 1) // self.world)


@dataclass(frozen=True)
class Source:
    """Training or validation data of any accepted kind."""

    data: Any  # a pair of tensors, a Dataset, or the loader of an IterableDataset
    rows: int
    batch_size: int  # rows of a whole batch
    shuffled: bool = True  # whether every epoch has a new order
    drop_last: bool = False  # whether a last batch that is not full is left out
    loading: tuple[tuple[str, Any], ...] = ()  # options for the DataLoader of a Dataset
    sampler: Any = None  # the user's own batch sampler, which yields the rows of the batches
    pack: Pack | None = None
    whole: bool = False  # whether a pair is one batch, whose inputs are never cut or indexed

    @property
    def steps(self) -> int:
        """Number of batches per epoch."""
        if isinstance(self.data, DataLoader):
            return len(self.data)
        if self.sampler is not None:
            return len(self.sampler)
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    @property
    def divisible(self) -> bool:
        """Whether `split` can take rows out: not where the user's own sampler or iterable chooses them."""
        return not isinstance(self.data, DataLoader) and self.sampler is None and not self.whole

    def split(self, rows: int, seed: int) -> tuple["Source", "Source"]:
        """Returns a random (train, held-out) split with `rows` held out, both in their original order."""

        def part(numbers: Tensor) -> Source:
            pair = isinstance(self.data, tuple)
            data = tree_map(lambda t: t[numbers], self.data) if pair else Subset(self.data, numbers.tolist())
            return replace(self, data=data, rows=len(numbers), batch_size=min(self.batch_size, len(numbers)))

        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(seed))
        out = part(order[:rows].sort().values)
        return part(order[rows:].sort().values), replace(out, shuffled=False, drop_last=False)

    def fingerprint(self) -> str:
        """Returns a hash of the data: their size, all targets, and 64 rows of inputs.

        The 64 rows of a Dataset are loaded twice: what differs is augmented at random and is left out. If it does not
        hold its targets (see `_held_targets`), those of other rows are left out, too. Of an iterable only the length is
        hashed.
        """
        digest, parts = hashlib.blake2b(str(self.rows).encode(), digest_size=16), list[Tensor]()
        if isinstance(self.data, tuple):
            x, y = self.data
            parts = [y, *tensors(tree_map(lambda t: t[_spread(len(y)).to(t.device)], x))]
        elif not isinstance(self.data, DataLoader):
            loading = tuple((name, value) for name, value in self.loading if name == "collate_fn")
            alone, loaded = replace(self, loading=loading), []
            for _ in range(2):
                with generators_restored():
                    seed_generators(self.rows)
                    loaded.append(list(tensors(alone.take(_spread(len(self.data))))))
            parts = [a for a, b in zip(*loaded, strict=True) if a.shape == b.shape and torch.equal(a, b)]
            parts += _held_targets(self.data)
        for part in parts:
            part = part.detach().cpu().contiguous()
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
            digest.update(ctypes.string_at(part.data_ptr(), part.numel() * part.element_size()))
        return digest.hexdigest()

    def shared(self, other: "Source") -> float:
        """Returns the share of (about 64) rows of other tensors that these have too; 0 where there are no tensors."""
        mine, theirs = (source.data for source in (self, other))
        mine, theirs = (data.tensors if isinstance(data, TensorDataset) else data for data in (mine, theirs))
        if self.sampler or other.sampler or not isinstance(mine, tuple) or not isinstance(theirs, tuple):
            return 0.0
        return float(torch.isin(_keys(theirs, some=True), _keys(mine)).float().mean())

    def epoch(self, seed: int, number: int, *, first: int = 0, worker: Worker | None = None) -> Iterator[Share]:
        """Returns this worker's shares of an epoch's batches, from batch `first` on."""
        if self.whole:
            return iter([Share(self.data[0], self.data[1], 0, self.rows)])
        worker, word = worker or Worker(), numbered_seed(seed, number)
        if isinstance(self.data, DataLoader):
            return self._iterable(word, first, worker)
        batches = [b for b in self._order(word) if len(b) >= worker.world]  # no worker goes without
        return self._indexed(batches, word, first, worker)

    def inputs(self, rows: int | None = None) -> tuple[Iterator[tuple[Inputs]], list[Tensor]]:
        """Returns the inputs of an epoch, and a list that collects their targets; it ends once there are `rows`."""
        targets: list[Tensor] = []

        def taken() -> Iterator[tuple[Inputs]]:
            for share in self.epoch(0, 0):
                targets.append(share.y)
                yield (share.x,)
                if rows is not None and sum(map(len, targets)) >= rows:
                    return

        return taken(), targets

    def take(self, rows: Tensor) -> tuple[Inputs, Tensor]:
        """Returns inputs and targets of rows by their indices."""
        share = next(self._indexed([rows], 0, 0, Worker()))
        return share.x, share.y

    def _order(self, word: int) -> list[Tensor]:
        """Returns the rows of each batch of an epoch."""
        if self.sampler is not None:
            with generators_restored():
                seed_generators(word)
                return [torch.tensor(list(batch)) for batch in self.sampler]
        order = torch.arange(self.rows)
        if self.shuffled:
            order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(word))
        return [b for b in order.split(self.batch_size) if len(b) == self.batch_size or not self.drop_last]

    def _indexed(self, batches: list[Tensor], word: int, first: int, worker: Worker) -> Iterator[Share]:
        parts = [batch[worker.part(len(batch))] for batch in batches]
        if isinstance(self.data, tuple):
            pairs: Iterable[Any] = (tree_map(lambda t: t[part], self.data) for part in parts[first:])  # noqa: B023
        else:
            options = dict(self.loading)
            skip = first if options.get("num_workers") else 0  # loading processes must go through what was skipped
            options.setdefault("collate_fn", _collate)
            options["generator"] = torch.Generator().manual_seed(word)  # decides the loading processes' own seeds
            loader = DataLoader(self.data, batch_sampler=[p.tolist() for p in parts[first - skip :]], **options)
            pairs = (split_batch(batch, self.pack) for number, batch in enumerate(loader) if number >= skip)
        for whole, (x, y) in zip(batches[first:], pairs, strict=True):
            yield Share(x, y, worker.part(len(whole)).start, len(whole))

    def _iterable(self, word: int, first: int, worker: Worker) -> Iterator[Share]:
        """Yields shares of an IterableDataset's loader: every worker iterates all of it and takes its rows."""
        seed_generators(word)
        for number, batch in enumerate(self.data):
            x, y = split_batch(batch, self.pack)
            rows = batch_length(x)
            if number >= first and rows >= worker.world:
                part = worker.part(rows)
                yield Share(slice_rows(x, part, rows), y[part], part.start, rows)


def _spread(length: int) -> Tensor:
    """Returns up to 64 indices, evenly spread."""
    return torch.linspace(0, length - 1, min(length, SAMPLED)).long()


def _keys(pair: Any, *, some: bool = False) -> Tensor:
    """Returns an integer for each row, or for some of them, that depends on up to 64 of its inputs and targets each."""
    found = torch.tensor(0)
    first, *_, last = tensors(pair)
    for factor, part in ((1, first), (3, last)):
        flat = part.detach().to_dense().reshape(len(part), -1)
        flat = flat[_spread(len(part))] if some else flat
        columns = _spread(flat.shape[1])
        factors = 2 * torch.arange(len(columns)) + 0x1E3779B97F4A7C15
        values = (rows[:, columns.to(rows.device)].cpu().double().view(torch.int64) for rows in flat.split(2**16))
        found = found + factor * torch.cat([(part * factors).sum(1) for part in values])
    return found


def as_source(
    data: Any,
    *,
    batch_size: int | None,
    name: str = "train",
    workers: int = 0,
    shuffled: bool = True,
    pack: Pack | None = None,
) -> Source:
    """Reads a Dataset, a DataLoader, a list of dicts, or a pair (inputs, targets) of tensors or arrays.

    A `batch_size` of None takes a pair as one batch.
    """
    if isinstance(data, DataLoader):
        return replace(_from_loader(data, name, shuffled), pack=pack)
    if dicts := isinstance(data, list) and len(data) > 0 and all(isinstance(row, Mapping) for row in data):
        data = [{key: _numbers(value, name, f"values of {key!r}", True) for key, value in row.items()} for row in data]
    if isinstance(data, tuple | list) and len(data) == 2 and not dicts:
        x, y = _numbers(data[0], name, "inputs"), _numbers(data[1], name, "targets")
        y = pack(y) if pack is not None and isinstance(y, Mapping) else y
        if not isinstance(y, Tensor) or y.dim() == 0:
            inner = f" of {type(data[1][0]).__name__}" if isinstance(data[1], tuple | list) and data[1] else ""
            got, remedy = f"a {type(data[1]).__name__}{inner}", "Pass torch.tensor(y), with classes numbered from 0."
            raise TypeError(complaint(name, "a pair (x, y) whose targets are a tensor or array", got, remedy))
        if (rows := batch_length(x)) != len(y):
            got = f"{rows} inputs and {len(y)} targets"
            raise ValueError(complaint(name, "as many inputs as targets", got, "Pass (x, y) of equal length."))
        return Source((x, y), len(y), min(batch_size or len(y), len(y)), shuffled, whole=batch_size is None)
    if dicts or (isinstance(data, Dataset) and not isinstance(data, IterableDataset) and isinstance(data, Sized)):
        if len(data) == 0:
            raise ValueError(complaint(name, "at least one example", "an empty dataset", "Pass data."))
        size, loading = min(batch_size or len(data), len(data)), (("num_workers", workers),)
        return Source(data, len(data), size, shuffled, loading=loading, pack=pack)
    expected, got = "a Dataset, a DataLoader or a pair (x, y)", type(data).__name__
    alone = isinstance(data, Tensor) or hasattr(data, "__array__")
    remedy = f"Pass inputs and targets as a pair: {name}=(x, y)." if alone else "Wrap it in a DataLoader."
    raise TypeError(complaint(name, expected, got, remedy))


def _numbers(data: Any, name: str, what: str, row: bool = False) -> Any:
    """Returns arrays as tensors, and Python's numbers in a row; raises if they hold no numbers."""
    try:
        return torch.as_tensor(as_tensors(data)) if row else as_tensors(data)
    except (TypeError, ValueError) as error:  # of strings, of objects
        remedy = "Number the classes from 0." if what == "targets" else "Turn categories into numbers, row by row."
        raise TypeError(complaint(name, f"data whose {what} are numbers", str(error), remedy)) from error


def _from_loader(loader: DataLoader[Any], name: str, shuffled: bool) -> Source:
    """Takes over a loader's dataset, order and options, so that an epoch can be resumed anywhere."""
    try:
        rows = len(loader.dataset)  # type: ignore[arg-type]
        len(loader)
    except TypeError:
        remedy = "Give the dataset and the sampler a __len__: KL and schedules need it."
        raise TypeError(complaint(name, "a loader of known length", "one without", remedy)) from None
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return Source(loader, rows, loader.batch_size or 1)
    kept = ("num_workers", "collate_fn", "pin_memory", "worker_init_fn", "prefetch_factor", "timeout")
    loading = tuple((option, getattr(loader, option)) for option in (*kept, "multiprocessing_context"))
    sampler = loader.sampler
    whole = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == rows
    plain = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and whole)
    if type(loader.batch_sampler) is not BatchSampler or not plain or loader.batch_size is None:
        drawn = len(sampler) if type(loader.batch_sampler) is BatchSampler and isinstance(sampler, Sized) else rows
        return Source(loader.dataset, drawn, loader.batch_size or 1, loading=loading, sampler=loader.batch_sampler)
    drop_last = loader.drop_last and rows >= loader.batch_size
    return Source(loader.dataset, rows, min(loader.batch_size, rows), shuffled and whole, drop_last, loading)


def _collate(rows: Any) -> Any:
    """Returns a batch of rows; a tuple is a batch already, made by the dataset's `__getitems__`."""
    return rows if isinstance(rows, tuple) else default_collate(rows)


def _held_targets(data: Any) -> list[Tensor]:
    """Returns what a Dataset, or the one that it is a part of, holds as `tensors[-1]`, `targets`, `labels` or `y`."""
    if isinstance(data, Subset):
        return [part[torch.as_tensor(data.indices)] for part in _held_targets(data.dataset)]
    held, found = getattr(data, "__dict__", {}), list[Tensor]()  # no properties, which may load files
    for part in (*held.get("tensors", ())[-1:], *(held[name] for name in ("targets", "labels", "y") if name in held)):
        with suppress(TypeError, ValueError, RuntimeError):  # strings, objects
            found.append(torch.as_tensor(part))
    return [part for part in found if part.shape[:1] == (len(data),)]


def gather(source: Source, seed: int, name: str) -> tuple[Inputs, Tensor]:
    """Returns all inputs and targets of one epoch of a source; `name` is the argument's."""
    x, y = joined([(share.x, share.y) for share in source.epoch(seed, 0)], name)
    return x, y


def joined(batches: list[Any], name: str) -> Any:
    """Returns the rows of all batches of an argument together; what has no rows is the first batch's."""
    rows = batch_length(batches[0])

    def join(first: Any, *others: Any) -> Any:
        return torch.cat([first, *others]) if isinstance(first, Tensor) and first.shape[:1] == (rows,) else first

    try:
        return map_trees(join, *batches)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(complaint(name, "batches of rows of one shape", error, "Pad them to one length.")) from error


def split_batch(batch: Any, pack: Pack | None = None) -> tuple[Inputs, Tensor]:
    """Returns inputs and targets of a loader's batch: (x, y), (x1, x2, …, y), or a mapping with "labels"."""
    target = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        target = batch[-1]
    if pack is not None and isinstance(target, Mapping):
        target = pack(target)
    if not isinstance(target, Tensor):
        got = f"a {type(batch).__name__}" + ("" if target is None else f" whose targets are a {type(target).__name__}")
        wanted, remedy = 'a pair (x, y) or a dict with "labels", targets as a tensor', "Set the loader's collate_fn."
        raise TypeError(complaint("batch", wanted, got, remedy))
    return split_inputs(batch), target
