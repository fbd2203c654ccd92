"""PIECES: inputs go through a network a few rows at a time, in bounded memory, shared between workers."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from ibnn.errors import complaint
from ibnn.inputs import Inputs, as_tensors, batch_length, call_arguments, slice_rows, split_inputs, tensors, tree_map
from ibnn.layers.observe import Peak, out_of_memory
from ibnn.progress import track


class Movable(Protocol):
    """What a piece of the inputs gives: a tensor or a prediction."""

    def to(self, device: torch.device, /) -> Self:
        """Returns the same on another device."""


class Parametric(Protocol):
    """Anything with parameters."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """As `nn.Module.parameters`."""


T = TypeVar("T", bound=Movable)
Answer = Callable[[Inputs, int, int], T]  # of a piece, the number of its first row, and how many rows may pass at once


def by_pieces(
    method: Parametric, inputs: Inputs, answer: Answer[T], *, batch_size: int, max_memory: int | None, progress: bool
) -> list[T]:
    """Answers inputs, or the batches of a loader, piece by piece.

    Args:
        method: Whose device and dtype the inputs get.
        inputs: As `ibnn.predict` takes them.
        answer: Answers one piece.
        batch_size: Most rows of a piece; pieces that do not fit into memory are halved, and so are those to come.
        max_memory: Bytes that a piece may take beside parameters and inputs; None leaves it at `batch_size`.
        progress: Shows a bar over a loader.

    Returns:
        The answers of all pieces in order, on the inputs' device; on the CPU for a loader.
    """
    dtype = next((p.dtype for p in method.parameters() if p.is_floating_point()), torch.float32)
    inputs = as_tensors(inputs, dtype)
    pieces = _Pieces(method, answer, batch_size, max_memory)
    home, rank, world = next(tensors(inputs), torch.empty(0)).device, 0, 1
    batches: Iterable[Inputs] = [inputs]
    if not isinstance(inputs, Tensor | tuple | list | dict) and isinstance(inputs, Iterable):
        home, (rank, world) = torch.device("cpu"), _worker()
        batches = (as_tensors(split_inputs(b), dtype) for b in (track(inputs, "predict") if progress else inputs))
    answers: list[tuple[int, T]] = []  # with the number of their batch
    first = 0
    with torch.no_grad():
        for number, batch in enumerate(batches):
            rows = batch_length(batch)
            if number % world == rank:
                refuse_nan(batch, first=first)
                answers += [(number, part.to(home)) for part in pieces(batch, first)]
            first += rows
    if world > 1:
        answers = _gathered(answers, world)
    if not answers:
        raise ValueError(complaint("inputs", "at least one batch", "an empty loader", "Pass a loader with data."))
    return [part for _, part in answers]


class _Pieces:
    """Cuts batches into pieces and answers them."""

    def __init__(self, method: Parametric, answer: Answer[T], size: int, max_memory: int | None) -> None:
        self.method, self.answer, self.size, self.max_memory = method, answer, size, max_memory

    def __call__(self, batch: Inputs, first: int) -> Iterator[Any]:
        """Yields the answers of a batch whose first row has this number."""
        rows, start = batch_length(batch), 0
        device = next(self.method.parameters()).device
        while start < rows:
            part = slice(start, start + self.size)
            piece = batch if self.size >= rows else slice_rows(batch, part, rows)
            piece = tree_map(lambda t: t.to(device), piece)
            try:
                if self.max_memory is not None:
                    self._fit(piece, first + start, self.max_memory)
                    continue
                answer = self.answer(piece, first + start, self.size)
            except (MemoryError, RuntimeError) as error:
                if self.size == 1 or not out_of_memory(error):
                    raise
                self.size = -(-min(self.size, rows) // 2)
                continue
            yield answer
            start = part.stop

    def _fit(self, piece: Inputs, first: int, max_memory: int) -> None:
        """Chooses the rows at once by the most memory that one and two rows take."""
        rows, peaks = batch_length(piece), []
        self.answer(slice_rows(piece, slice(0, 1), rows), first, 1)  # makes what is made but once
        for size in range(1, min(rows, 2) + 1):
            with Peak([*self.method.parameters(), *tensors(piece)]) as peak:
                self.answer(slice_rows(piece, slice(0, size), rows), first, size)
            peaks.append(peak.bytes)
        each = max(1, peaks[-1] - peaks[0] if len(peaks) == 2 else peaks[0])
        self.size = max(1, min(self.size, 1 + (max_memory - peaks[0]) // each))
        self.max_memory = None  # spent


def _worker() -> tuple[int, int]:
    """Returns the rank and the number of workers."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _gathered(parts: list[tuple[int, T]], world: int) -> list[tuple[int, T]]:
    """Returns all workers' parts in the order of their batches."""
    everyone: list[Any] = [None] * world
    torch.distributed.all_gather_object(everyone, parts)
    return sorted((part for theirs in everyone for part in theirs), key=lambda part: part[0])


def refuse_nan(inputs: Inputs, first: int = 0, argument: str = "", *, infinity: bool = False) -> None:
    """Raises for a batch with NaN, or infinity, not minus infinity, which masks.

    Args:
        inputs: The batch.
        first: The number of its first row.
        argument: What is named; by default the input with it.
        infinity: Whether that is refused, too.
    """
    rows = batch_length(inputs)
    named = (
        inputs if isinstance(inputs, Mapping) else {f"input {i}": t for i, t in enumerate(call_arguments(inputs)[0])}
    )
    for name, value in named.items():
        for tensor in tensors(value):
            if not tensor.is_floating_point() or not tensor.dim() or len(tensor) != rows:
                continue
            bad = ~(tensor < math.inf) if infinity else tensor.isnan()
            if bad.any():
                row = first + int(bad.reshape(rows, -1).any(1).nonzero()[0])
                what = "NaN" if tensor.isnan().any() else "infinity"
                got, remedy = f"{what} in row {row}", "Clean or drop that row."
                raise ValueError(complaint(argument or name, f"free of {what}", got, remedy))
