"""The loss of networks that compute it themselves from `labels` (Hugging Face's), for the answer of all draws."""

from collections.abc import Callable, MutableMapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ibnn.errors import complaint
from ibnn.inputs import pick
from ibnn.layers.bypass import returned
from ibnn.likelihood import Categorical


def with_loss(model: Any, run: Callable[[], Any], combined: Any, labels: Tensor) -> Any:
    """Returns the network's own output, with its loss, for the combined logits of all draws.

    One more pass finds the module that returns the logits. In a last pass it returns the combined ones instead. If no
    module returns them as they are and there is one label per row, the loss is the likelihood's.

    Args:
        model: The converted network.
        run: Runs the network once with one of the draws.
        combined: The answer of all draws.
        labels: What the network was given.
    """
    with returned(model.net) as modules:
        output = run()
    if isinstance(output, Tensor) or not isinstance(combined, Tensor):  # labels are an input like others
        return combined
    logits = model.likelihood.read(pick(output, model.logits))
    maker = next((module for module, tensor in reversed(modules) if tensor is logits), None)
    if maker is not None and combined.shape == logits.shape:
        with maker.register_forward_hook(lambda *_: combined.to(logits.dtype)):
            return run()
    plain = isinstance(output, MutableMapping) and "logits" in output and model.logits is None
    if not plain or not isinstance(model.likelihood, Categorical) or combined.dim() != 2:
        remedy = "Call it without labels, and compute the loss of what it returns."
        got = f"one whose logits {tuple(logits.shape)} come from no module as they are"
        raise TypeError(complaint("labels", "given to a network whose loss can be computed", got, remedy))
    output["logits"] = combined
    output["loss"] = F.nll_loss(combined, labels, ignore_index=model.likelihood.ignore_index)
    return output
