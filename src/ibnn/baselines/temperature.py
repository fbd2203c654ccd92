"""TEMPERATURE SCALING (Guo et al., 2017) of any method: one number, chosen on held-out labels."""

from typing import Any

import torch

from ibnn.batches import as_source
from ibnn.likelihood.temperature import best_temperature
from ibnn.prediction import draws
from ibnn.training.trainable import Trainable


def scale_temperature(method: Trainable, valid: Any, *, samples: int = 5) -> float:
    """Sets the temperature of a method's likelihood to that of the lowest held-out NLL, and returns it.

    Args:
        method: A trained baseline or iBNN; its draws are tempered, then averaged.
        valid: Held-out data: a Dataset, a DataLoader or a pair (inputs, targets).
        samples: Draws per component.
    """
    temperature = find_temperature(method, valid, samples=samples)
    method.likelihood.set_temperature(temperature)
    return temperature


def find_temperature(method: Trainable, valid: Any, *, samples: int = 5) -> float:
    """Returns the temperature of the lowest held-out NLL, and leaves the method alone; see `scale_temperature`."""
    inputs, targets = as_source(valid, batch_size=256, name="valid", shuffled=False).inputs()
    outputs = draws(method, inputs, samples=samples)
    return best_temperature(method.likelihood, outputs, torch.cat(targets).to(outputs.device))
