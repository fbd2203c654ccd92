import pytest
import torch

torch.set_num_threads(1)  # the tests themselves run side by side


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
