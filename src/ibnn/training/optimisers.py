"""OPTIMISERS: one for the weights, one for the latents, each on its schedule."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ibnn.training.recipe import Recipe
from ibnn.training.trainable import Trainable


def make_optimisers(model: Trainable, recipe: Recipe) -> list[Optimizer]:
    """Makes an optimiser for the weights and the likelihood's parameters, and one for the latents if there are any."""
    groups = model.parameter_groups(recipe.lr, recipe.latent_lr, recipe.weight_decay, undo_k=recipe.undo_k)
    latents = [group for group in groups if group["name"] == "latents"]
    others = [group for group in groups if group["name"] != "latents"]
    kinds = ((recipe.optimiser, others), (recipe.latent_optimiser, latents))
    return [_optimiser(kind, part, recipe.momentum) for kind, part in kinds if part]


def _optimiser(kind: str, groups: list[dict[str, Any]], momentum: float) -> Optimizer:
    if kind == "adam":
        return torch.optim.AdamW(groups)
    return torch.optim.SGD(groups, momentum=momentum, nesterov=momentum > 0)


def rates_at(t: float, recipe: Recipe) -> dict[str, float]:
    """Returns the learning rates when the share t of training is done.

    >>> rates_at(0.5, Recipe(lr=0.1))
    {'lr': 0.1, 'latent_lr': 0.01}
    """
    lr, latent_lr = recipe.lr * recipe.schedule.factor(t), recipe.latent_lr * recipe.latent_schedule.factor(t)
    return {"lr": lr, "latent_lr": latent_lr}


def set_rates(optimisers: Sequence[Optimizer], rates: Mapping[str, float], recipe: Recipe) -> None:
    """Sets the learning rates; the likelihood's own parameters move faster or slower by `noise_lr / lr`."""
    faster = (recipe.noise_lr or recipe.lr) / recipe.lr
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            rate = rates["latent_lr" if group["name"] == "latents" else "lr"]
            group["lr"] = rate * faster if group["name"] == "likelihood" else rate
