"""The global generators of torch, numpy and Python: seeded for what a user's network and data draw, and restored."""

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


@cache
def accelerator() -> Any:
    """Returns the module of this machine's accelerator (`torch.cuda`, `torch.mps`, …), or None."""
    kind = torch.accelerator.current_accelerator()
    return torch.get_device_module(kind) if kind is not None and torch.accelerator.is_available() else None


def seed_generators(*parts: int) -> None:
    """Seeds the global generators of torch, numpy and Python with a hash of integers."""
    seed = int.from_bytes(hashlib.blake2b(repr(tuple(map(int, parts))).encode(), digest_size=4).digest(), "big")
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a millisecond where there is no GPU
    if (module := accelerator()) is not None:
        module.manual_seed_all(seed) if hasattr(module, "manual_seed_all") else module.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restores the global generators of torch, numpy and Python at the end of a block."""
    numpy = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    module = accelerator()
    ending = "_all" if hasattr(module, "get_rng_state_all") else ""  # MPS has one state alone
    held = getattr(module, f"get_rng_state{ending}", lambda: None)()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy:
            numpy.random.set_state(states[2])
        if held is not None:
            getattr(module, f"set_rng_state{ending}")(held)
