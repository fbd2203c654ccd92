"""Trains the members of an ensemble, each on all folds but one, for as long as held-out rows improve.

Every row is held out by one member, so every row tells how well a network answers that has not seen it. These answers
decide how long to train, when to lower the learning rate, which weights to keep and how much noise the nodes get.
`ibnn.fit` trains one network on one set of rows; here members have rows of their own, and small tables need short
steps, so this is a loop of its own.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.model_selection import KFold, StratifiedKFold
from torch import Tensor, nn

from ibnn.network import IBNN
from ibnn.progress import Bar

Array = np.ndarray[Any, Any]
Loss = Callable[[Tensor, Tensor], Tensor]  # outputs (…, outputs) and targets (…, targets) to losses (…)

NONE = 1e-3  # standard deviation of noise that is as good as none: networks are trained without it

WARMUP = 20  # steps over which the learning rate rises
CHECK = 25  # steps between looks at the held-out rows, or half an epoch if that is more
PATIENCE = (6, 3, 3)  # checks without progress after which the rate drops; after the last one training stops
DROP = 0.3  # factor on the learning rate
PROGRESS = 2e-3  # relative improvement that counts as progress
AVERAGED = 30  # steps that the weights are averaged over, with exponentially falling shares
ANNEAL = 0.3  # share of the longest run in which the rate falls to 0
ROUND = 100  # steps that candidates are trained for before they are compared
MARGIN = 1.1  # candidates whose loss is larger by this factor after a round are dropped
DRAWS = 4  # of the noise, for each held-out row


class Rows(NamedTuple):
    """What members are trained on."""

    x: Tensor  # (n, inputs)
    y: Tensor  # (n, targets)
    weight: Tensor  # (n,)
    fold: Tensor  # (n,) the member that does not train on a row; −1: all members do


class Pace(NamedTuple):
    """How members are trained."""

    lr: float
    weight_decay: float
    batch_size: int
    steps: int  # the most
    seed: int


def folds(rows: int, members: int, labels: Array | None, seed: int) -> Array:
    """Returns the member that holds each row out, in equal shares, stratified where every class has enough rows."""
    numbers = np.full(rows, -1)
    common = labels is not None and np.bincount(labels)[np.unique(labels)].min() >= members
    kind = StratifiedKFold if common else KFold
    for member, (_, held) in enumerate(kind(members, shuffle=True, random_state=seed).split(numbers, labels)):
        numbers[held] = member
    return numbers


class Run:
    """The training of one ensemble; `best` is the lowest held-out loss so far."""

    def __init__(
        self, net: nn.Module, members: int, rows: Rows, loss: Loss, pace: Pace, noisy: IBNN | None = None
    ) -> None:
        """Takes M networks, (B, M, inputs) to (B, M, outputs), and the model that puts noise on their nodes, if any."""
        self.net, self.members, self.rows, self.loss, self.pace, self.noisy = net, members, rows, loss, pace, noisy
        self.parameters: list[Tensor] = [p for p in net.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(
            self.parameters, lr=pace.lr, betas=(0.9, 0.99), weight_decay=pace.weight_decay, fused=rows.x.is_cpu
        )
        self.random = torch.Generator().manual_seed(pace.seed)
        self.held = [(rows.fold.cpu() == member).nonzero()[:, 0] for member in range(members)]
        self.size = len(rows.x) - max(map(len, self.held))  # rows of a member
        self.batches = math.ceil(self.size / pace.batch_size)
        self.step, self.drops, self.stale = 0, 0, 0
        self.best, self.history, self.done = math.inf, list[dict[str, float]](), False
        self.average, self.kept = ([p.detach().clone() for p in self.parameters] for _ in range(2))
        self.order = self._batches()

    def _batches(self) -> Iterator[Tensor]:
        """Yields rows of each member, (B, M), epoch after epoch in another order."""
        width = math.ceil(self.size / self.batches)
        while True:
            keys = torch.rand(len(self.rows.x), self.members, generator=self.random)
            for member, held in enumerate(self.held):
                keys[held, member] = 2.0
            yield from keys.argsort(0)[: self.size].split(width)

    def advance(self, steps: int, bar: Bar | None = None) -> None:
        """Trains for some more steps, unless training has stopped."""
        every, run = max(CHECK, self.batches // 2), self.noisy or self.net
        run.train()
        if self.step == 0:
            self._check()
        for _ in range(steps):
            if self.done:
                break
            rows = next(self.order).to(self.rows.x.device)
            for group in self.optimiser.param_groups:
                group["lr"] = self.rate()
            x, y, weight = self.rows.x[rows], self.rows.y[rows], self.rows.weight[rows]  # (B, M, …)
            losses = self.loss(run(x), y)
            loss = ((weight * losses).sum(0) / weight.sum(0)).sum()
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()
            self.optimiser.step()
            self.step += 1
            torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 / min(self.step, AVERAGED))
            if bar is not None:
                bar.update(done=self.step, title=f"held-out loss {self.best:.4g}")
            self.done = self.step >= self.pace.steps
            if self.step % every == 0 or self.done:
                self._check()

    def rate(self) -> float:
        """Returns the learning rate of the next step."""
        left = (1 - self.step / self.pace.steps) / ANNEAL
        return self.pace.lr * DROP**self.drops * min(1.0, left, (self.step + 1) / WARMUP)

    @torch.no_grad()
    def _check(self) -> None:
        """Compares held-out rows with the best so far, keeps the best weights, lowers the rate or stops."""
        if not any(len(held) for held in self.held):
            return
        present = [p.detach().clone() for p in self.parameters]
        torch._foreach_copy_(self.parameters, self.average)
        loss = float(np.average(self.losses().cpu().numpy(), weights=self.rows.weight.cpu().numpy()))
        self.history.append({"step": self.step, "held_out_loss": loss, "lr": self.rate()})
        progress = math.isinf(self.best) or loss < self.best - PROGRESS * abs(self.best)  # NaN is none
        self.stale = 0 if progress else self.stale + 1
        if loss < self.best:
            self.best = loss
            torch._foreach_copy_(self.kept, self.parameters)
        torch._foreach_copy_(self.parameters, present)
        if self.stale >= PATIENCE[self.drops]:
            torch._foreach_copy_(self.parameters, self.kept)
            torch._foreach_copy_(self.average, self.kept)
            self.drops, self.stale = self.drops + 1, 0
            self.done = self.done or self.drops == len(PATIENCE)

    @torch.no_grad()
    def finish(self) -> None:
        """Goes back to the best weights."""
        if self.history:
            torch._foreach_copy_(self.parameters, self.kept)

    def losses(self) -> Tensor:
        """Returns the loss of each row, (n,), by the member that holds it out."""
        return self.loss(self.answers(), self.rows.y)

    @torch.no_grad()
    def answers(self) -> Tensor:
        """Returns the output for each row, (n, outputs), of the member that holds it out."""
        width = max(map(len, self.held))
        index = torch.stack([held[torch.arange(width) % len(held)] for held in self.held], 1)  # (width, M)
        index = index.to(self.rows.x.device)
        if self.noisy is None:
            found: Tensor = self.net(self.rows.x[index])  # (width, M, outputs)
        else:
            with self.noisy.evaluating():
                drawn = self.noisy.outputs(self.rows.x[index], self.noisy.draw_latents(DRAWS, self.pace.seed))
            found = self.noisy.likelihood.combine(drawn.flatten(1, 2)[:, :, None])
            found = found.reshape(width, self.members, -1)
        answers = found.new_zeros(len(self.rows.x), found.shape[-1])
        answers[index] = found  # those that fill up short columns repeat others
        return answers


def train(runs: Sequence[Run], bar: Bar | None = None) -> Run:
    """Trains candidates until one of them is clearly the best, and that one to its end; returns it.

    All are trained for a round. Those that are far behind are dropped, the others have a second round, and the one with
    the lowest held-out loss goes on.
    """
    for _ in range(2 if len(runs) > 1 else 0):
        for run in runs:
            run.advance(ROUND, bar)
        least = min(run.best for run in runs)
        runs = [run for run in runs if run.best <= MARGIN * least] or runs
    best = min(runs, key=lambda run: run.best)
    best.advance(best.pace.steps, bar)
    best.finish()
    return best
