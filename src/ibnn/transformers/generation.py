"""Generates text with uncertainty, token by token, through the network's own `generate`.

J draws pass as J copies of the batch: every row has the z of its draw, and each draw its own key-value cache. At each
step the copies' next-token probabilities are averaged, and all copies of a row continue with the same token.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ibnn import check
from ibnn.draws import Draw
from ibnn.errors import complaint
from ibnn.inputs import batch_length, call_arguments, repeat_rows, tree_map
from ibnn.likelihood import Categorical
from ibnn.network import IBNN, by_layer, mean_latents, no_fast_path

Networks = Literal["all", "mean", "each"]


@dataclass(frozen=True)
class Generation:
    """Generated sequences, with the uncertainty of each new token in nats; all is 0 after a sequence has ended."""

    sequences: Tensor  #: What the network's `generate` returns, with the prompt of a causal model, (B, L).
    tokens: Tensor  #: The new tokens, (B, T).
    mask: Tensor  #: Which of them belong to the sequence, (B, T): those up to its first end token.
    log_probs: Tensor  #: Log-probability of each new token, (B, T).
    total: Tensor  #: Entropy of the mean probabilities before each token, (B, T).
    aleatoric: Tensor  #: Mean entropy of the draws' probabilities, (B, T).

    @property
    def epistemic(self) -> Tensor:
        """How much the draws disagree about each token, (B, T)."""
        return self.total - self.aleatoric

    @property
    def of_sequence(self) -> dict[str, Tensor]:
        """Sums over the tokens of each sequence, (B,), by name; divide by `mask.sum(1)` for means per token."""
        return {name: getattr(self, name).sum(1) for name in ("log_probs", "total", "aleatoric", "epistemic")}


def generate(
    model: IBNN,
    inputs: Any = None,
    *,
    networks: Networks = "all",
    samples: int = 1,
    seed: int = 0,
    do_sample: bool = False,
    **options: Any,
) -> Generation:
    """Generates sequences with the `generate` of the model's network, also as `model.generate(...)`.

    Args:
        model: A converted causal or encoder–decoder model.
        inputs: The prompts: token ids (B, L), or a mapping of what the network's `generate` takes. Tensors may also be
            passed by keyword, such as `input_ids` and `attention_mask`.
        networks: "all" averages the next-token probabilities of J = K · `samples` draws. "mean" is one network at the
            mean of the component means, J = 1. "each" gives every sequence a draw of its own, J = 1: row b has
            `model.draw(b % K, b // K, seed)`.
        samples: Draws per component, S.
        seed: Decides the draws, and the tokens if they are sampled.
        do_sample: Draws tokens from the mean probabilities; by default the most probable token is taken.
        options: For the network's `generate`, such as `max_new_tokens`; beams and several sequences are refused.
    """
    check.choice("networks", networks, ("all", "mean", "each"))
    check.integer("samples", samples, remedy="Pass samples=1.")
    for name in ("num_beams", "num_return_sequences"):
        if options.get(name, 1) != 1:
            raise ValueError(complaint(name, "1", options[name], "Leave it out, or use model.draw(0).generate(...)."))
    if not isinstance(model.likelihood, Categorical):
        got = type(model.likelihood).__name__
        raise TypeError(complaint("model", "of a categorical likelihood", got, "Convert it with that likelihood."))
    if inputs is None:
        inputs = {name: value for name, value in options.items() if isinstance(value, Tensor)}
        options = {name: value for name, value in options.items() if name not in inputs}
    args, kwargs = call_arguments(inputs)
    rows = batch_length(inputs)
    with model.evaluating(), no_fast_path(), torch.no_grad():
        drawn, copies = _drawn(model, networks, rows, samples, seed)
        average = _Average(model.likelihood.temperature, copies, do_sample, seed)
        args, kwargs = tree_map(lambda t: repeat_rows(t, rows, copies), (args, kwargs))
        own = [*options.pop("logits_processor", []), average]
        z = [part for _, _, part in by_layer(model, drawn.z)]
        with model._pass.multiplying(z, model._units(drawn)):
            net: Any = model.net
            found = net.generate(*args, **kwargs, do_sample=False, logits_processor=own, **options)
    sequences: Tensor = getattr(found, "sequences", found)[:rows]
    log_probs, total, aleatoric = (torch.stack(steps, 1) for steps in zip(*average.steps, strict=True))
    tokens = sequences[:, -total.shape[1] :]
    ends = options.get("eos_token_id", net.generation_config.eos_token_id)
    ended = torch.isin(tokens, torch.as_tensor([] if ends is None else ends, device=tokens.device)).cumsum(1)
    mask = torch.cat([torch.ones_like(ended[:, :1]), ended[:, :-1] == 0], 1).bool()
    return Generation(sequences, tokens, mask, log_probs * mask, total * mask, aleatoric * mask)


def _drawn(model: IBNN, networks: Networks, rows: int, samples: int, seed: int) -> tuple[Draw, int]:
    """Returns what multiplies the rows, and how many copies of the batch there are."""
    if networks == "mean":
        return Draw(mean_latents(model)), 1
    if networks == "each":
        components = model.components
        drawn = model.draw_latents(-(-rows // components), seed)
        index = torch.arange(rows, device=drawn.z.device)
        order = index % components * (len(drawn) // components) + index // components
        return drawn[order], 1
    drawn = model.draw_latents(samples, seed)
    return drawn.as_rows(rows), len(drawn)


class _Average:
    """A logits processor that averages over copies of the batch, chooses a token for all of them, and takes notes."""

    def __init__(self, temperature: Tensor, copies: int, do_sample: bool, seed: int) -> None:
        self.temperature, self.copies, self.do_sample = temperature, copies, do_sample
        self.generator = torch.Generator().manual_seed(seed)
        self.steps: list[tuple[Tensor, Tensor, Tensor]] = []  # of the chosen tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        probs = (scores.float() / self.temperature).softmax(-1).unflatten(0, (self.copies, -1))  # (J, B, V)
        mean = probs.mean(0)
        chosen = mean.argmax(-1)
        if self.do_sample:
            chosen = torch.multinomial(mean.cpu(), 1, generator=self.generator)[:, 0].to(mean.device)
        total, aleatoric = (torch.special.entr(p).sum(-1) for p in (mean, probs))
        self.steps.append((mean.gather(-1, chosen[:, None])[:, 0].log(), total, aleatoric.mean(0)))
        alone = torch.full_like(mean, -torch.inf).scatter(-1, chosen[:, None], 0.0)
        return alone.repeat(self.copies, 1)
