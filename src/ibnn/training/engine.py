"""accelerate's devices, workers, precision and trackers for the length of a run, and the optimisers."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, ProjectConfiguration
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ibnn.batches import Worker
from ibnn.errors import complaint
from ibnn.inputs import tree_map
from ibnn.training.recipe import NOISE_LR, Recipe, optimiser_class
from ibnn.training.trainable import Trainable


class Engine:
    """One run's Accelerator: which worker this is, where it computes, whether it is `main` and writes files."""

    def __init__(self, recipe: Recipe, folder: Path | None, rows: int, device: torch.device | None = None) -> None:
        """Makes the Accelerator. One worker computes on the model's own device; of several, accelerate decides."""
        if recipe.trackers and folder is None:
            raise ValueError(complaint("run_dir", "a folder when there are trackers", None, "Pass run_dir=..."))
        for name in recipe.trackers:
            if name not in [tracker.value for tracker in get_available_trackers()]:
                raise ValueError(complaint("trackers", "installed", name, f"Leave it out, or try pip install {name}."))
        self._owns_state = not AcceleratorState._shared_state
        alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        self.accelerator = Accelerator(
            device_placement=not alone,
            cpu=alone and self._owns_state and device is not None and device.type == "cpu",
            mixed_precision=recipe.precision,
            log_with=list(recipe.trackers) or None,
            project_config=ProjectConfiguration(project_dir=str(folder)) if folder else None,
        )
        self.worker, fault = Worker(self.accelerator.process_index, self.accelerator.num_processes), ""
        if self.accelerator.distributed_type == DistributedType.FSDP:
            fault = complaint("accelerate", "launched without FSDP", "FSDP", "Use DDP: weights must fit on a device.")
        if rows < self.worker.world:
            fault = complaint("train", "at least a row for each worker", rows, "Use fewer workers.")
        if fault:
            self.close()
            raise ValueError(fault)
        self.device = device if alone and device is not None else self.accelerator.device
        self.main = self.accelerator.is_main_process
        self._plain_steps = self.device.type == "cpu" and recipe.precision == "no"
        if recipe.trackers:
            self.accelerator.init_trackers("ibnn")

    def prepare(self, loss: nn.Module, optimisers: Sequence[Optimizer]) -> tuple[nn.Module, Sequence[Any]]:
        """Returns the loss as it runs on this worker's device, and what steps in place of the optimisers."""
        module, *steppers = self.accelerator.prepare(loss, *optimisers)
        # The same steps without accelerate's look-ups, which take a tenth of a small network's step:
        return module, optimisers if self._plain_steps else steppers

    def to_device(self, tree: Any) -> Any:
        """Returns tensors in nested containers on this worker's device."""
        return tree_map(lambda tensor: tensor.to(self.device), tree)

    def total(self, sums: Sequence[float], *, for_main: bool = False) -> list[float]:
        """Returns the sums over all workers; `for_main` leaves zeros to all but the main one."""
        if self.worker.world == 1:
            return list(sums)
        bits = torch.tensor([sums], dtype=torch.float64).view(torch.int64).to(self.device)  # it may have no float64
        total: list[float] = self.accelerator.gather(bits).cpu().view(torch.float64).sum(0).tolist()
        return total if self.main or not for_main else [0.0] * len(total)

    def highest(self, number: int) -> int:
        """Returns the largest of the workers' numbers."""
        return int(self.accelerator.gather(torch.tensor([number], device=self.device)).max())

    def log(self, row: Mapping[str, Any]) -> None:
        """Hands a row of the history to the trackers."""
        self.accelerator.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    def close(self) -> None:
        """Ends the trackers, and forgets the global state so that a later run may choose another precision."""
        for tracker in self.accelerator.trackers:
            tracker.finish()
        if self._owns_state:
            AcceleratorState._reset_state()


def make_optimisers(model: Trainable, recipe: Recipe) -> list[Optimizer]:
    """Makes an optimiser for the weights and the likelihood's parameters, and one for the latents if there are any."""
    groups = model.parameter_groups(recipe.lr, recipe.latent_lr, recipe.weight_decay, undo_k=recipe.undo_k)
    latents = [group for group in groups if group["name"] == "latents"]
    others = [group for group in groups if group["name"] != "latents"]
    made: list[Optimizer] = []
    for kind, part in ((recipe.optimiser, others), (recipe.latent_optimiser, latents)):
        options: dict[str, Any] = {}
        if kind == "sgd":
            options = {"momentum": recipe.momentum, "nesterov": recipe.momentum > 0}
        if kind == "adam":  # on the CPU the one that updates a tensor in one pass: half the time of small tensors
            parameters = [parameter for group in part for parameter in group["params"]]
            plain = all(type(p.data) is torch.Tensor and p.device.type == "cpu" for p in parameters)
            options = {"fused": True if plain else None}
        if part:
            made.append(optimiser_class(kind)(part, **options))
    return made


def trace_rates(scheduler: Any, recipe: Recipe, total: int) -> list[float]:
    """Returns the learning rates that a scheduler sets, one for each step of a run."""
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=recipe.lr, momentum=0.9)
    made, rates = scheduler(optimiser), []
    if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        expected = "a function of an optimiser that returns a scheduler of steps"
        raise TypeError(complaint("scheduler", expected, type(made).__name__, "Pass another, or patience=5."))
    for step in range(total):
        if step:
            optimiser.step()
            made.step()
        rates.append(float(optimiser.param_groups[0]["lr"]))
    return rates


def set_rates(optimisers: Sequence[Optimizer], rates: Mapping[str, float], recipe: Recipe) -> None:
    """Sets the learning rates; that of the likelihood's own parameters starts at `NOISE_LR` or more."""
    faster = max(NOISE_LR, recipe.lr) / recipe.lr
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            rate = rates["latent_lr" if group["name"] == "latents" else "lr"]
            group["lr"] = rate * faster if group["name"] == "likelihood" else rate
