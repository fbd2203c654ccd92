"""The global generators of torch, numpy and Python: seeded for what a user's network and data draw, and restored."""

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_generators(*parts: int) -> None:
    """Seeds the global generators of torch, numpy and Python with a hash of integers."""
    seed = int.from_bytes(hashlib.blake2b(repr(tuple(map(int, parts))).encode(), digest_size=4).digest(), "big")
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a millisecond where there is no GPU
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restores the global generators of torch, numpy and Python at the end of a block."""
    numpy = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy:
            numpy.random.set_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
