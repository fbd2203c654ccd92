import hypothesis
import pytest
import torch
from chromium import browser

__all__ = ["browser"]  # a fixture

torch.set_num_threads(1)  # the tests themselves run side by side
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)  # a busy machine is no failure
hypothesis.settings.load_profile("steady")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
