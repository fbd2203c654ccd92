"""transformers' `Trainer` with the ELBO as its loss."""

import inspect
import os
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils.generic import can_return_loss, find_labels

from ibnn.errors import complaint
from ibnn.files.saving import load
from ibnn.network import IBNN


class Trainer(transformers.Trainer):
    """Trains, evaluates, saves and resumes a converted network as transformers' Trainer does a plain one.

    The loss is the ELBO, with KL / N. Evaluation returns the loss of all draws together (`model.eval_samples` of each
    component). Saves and checkpoints are folders that `ibnn.load` reads. It runs in one process; on several, train
    with `ibnn.fit`.
    """

    model: Any
    optimizer: Any
    train_dataset: Any
    _signature_columns: Any
    loss_is_scaled_for_ga = False  # a mean over the batch, which Trainer divides among accumulated batches

    def __init__(
        self, model: IBNN, *args: Any, latent_lr: float | None = None, n_data: int | None = None, **kwargs: Any
    ):
        """Takes what `transformers.Trainer` takes.

        Args:
            model: What `ibnn.convert` returned.
            args: As in `transformers.Trainer`.
            latent_lr: Learning rate of the latents; default that of the weights.
            n_data: N, the number of targets in the training set: labels, or tokens of a language model. By default
                the number of rows times the targets per row in the first batch.
            kwargs: As in `transformers.Trainer`.
        """
        if not isinstance(model, IBNN):
            raise TypeError(complaint("model", "a converted network", type(model).__name__, "Convert it first."))
        super().__init__(model, *args, **kwargs)
        self.latent_lr, self.n_data, self.model_accepts_loss_kwargs = latent_lr, n_data, False
        net: Any = model.net
        plain = net.get_base_model() if hasattr(net, "get_base_model") else net  # peft wraps it
        self.decoder_inputs = getattr(plain, "prepare_decoder_input_ids_from_labels", None)
        self.can_return_loss = can_return_loss(type(plain))  # type: ignore[no-untyped-call]
        if self.args.label_names is None:
            self.label_names = find_labels(type(plain))  # type: ignore[no-untyped-call]
        columns = inspect.signature(plain.forward).parameters
        self._signature_columns = [*columns, *{"label", "label_ids", *self.label_names}]
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            raise ValueError(complaint("args", "of one process and device", "several", "Train with ibnn.fit."))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Returns the ELBO in train mode, and in eval mode the network's own loss of all draws together."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        labels = inputs.pop("labels", None)
        if labels is None:
            raise ValueError(complaint("inputs", 'a batch with "labels"', sorted(inputs), "Name the targets so."))
        if self.decoder_inputs is not None and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = self.decoder_inputs(labels)
        if self.n_data is None:
            self.n_data = round(len(self.train_dataset) * self.model.likelihood.count(labels) / len(labels))
        found = self.model.elbo(inputs, labels, n_data=max(self.n_data, self.model.likelihood.count(labels)))
        return (found.loss, {"nll": found.nll.detach()}) if return_outputs else found.loss

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Makes the optimiser of `args.optim` with groups for weights, latents and likelihood."""
        if self.optimizer is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            groups = self.model.parameter_groups(self.args.learning_rate, self.latent_lr, self.args.weight_decay)
            names = self.get_decay_parameter_names(self.model)
            decayed = {id(self.model.get_parameter(name)) for name in names}
            others = [p for p in groups[0]["params"] if id(p) not in decayed]
            kept = {**groups[0], "params": others, "weight_decay": 0.0}
            groups[0]["params"] = [p for p in groups[0]["params"] if id(p) in decayed]
            self.optimizer = kind([group for group in (*groups, kept) if group["params"]], **options)
        return self.optimizer

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = str(output_dir or self.args.output_dir)
        self.model.save_pretrained(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        saved = load(resume_from_checkpoint, self.model.component(0))  # whose weights the file replaces
        self.model.load_state_dict(saved.state_dict())

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))
