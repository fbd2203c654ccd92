"""Bytes of tensors, counted by hand."""

import pytest
import torch
from torch import nn

from ibnn.layers.observe import Peak, out_of_memory, saved_bytes

KB = 256  # floats


def test_peak_counts_what_is_alive_at_once() -> None:
    x = torch.zeros(KB)
    with Peak(known=[x]) as peak:
        a = x + 1
        b = a * 2
        del a
        c = b + b  # two are alive again, never three
        del b, c
    assert peak.bytes == 2 * 1024


def test_views_and_known_tensors_are_not_new() -> None:
    x = torch.zeros(KB)
    with Peak(known=[x]) as peak:
        x.view(16, 16).t()
        x.add_(1)
        assert peak.bytes == 0
        made = torch.zeros(KB, dtype=torch.float64)
        made.view(2, -1)
    assert peak.bytes == 2 * 1024


def test_saved_bytes_of_a_linear_layer() -> None:
    layer, x = nn.Linear(64, 32), torch.zeros(8, 64)
    with saved_bytes(known=[*layer.parameters()]) as saved:
        layer(x)
    assert saved.bytes == 4 * 8 * 64  # its input, for the gradient of the weight
    with torch.no_grad(), saved_bytes() as saved:
        layer(x)
    assert saved.bytes == 0


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA"), True),
        (RuntimeError("MPS backend Out of Memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("memory"), False),
    ],
)
def test_errors_that_say_that_memory_ran_out(error: BaseException, memory: bool) -> None:
    assert out_of_memory(error) == memory
