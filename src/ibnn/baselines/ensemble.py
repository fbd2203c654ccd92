"""`Ensemble`: several models as one method, whose components are its members."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ibnn import check
from ibnn.baselines.plain import Baseline, Plain
from ibnn.errors import complaint
from ibnn.inputs import Inputs
from ibnn.likelihood import Categorical, Heads, Likelihood
from ibnn.likelihood.mixing import mixing, on_one_scale
from ibnn.normal import numbered_seed
from ibnn.objective import ELBO
from ibnn.threads import one_at_a_time


class Ensemble(Baseline):
    """Several models as one method: each member is a component, and an answer mixes those of all members equally.

    Members may be iBNNs, baselines, or plain networks, which makes it a deep ensemble (Lakshminarayanan et al., 2017).
    Their noise and temperatures are their own. The ensemble has one temperature more, 1 until `scale_temperature`
    sets it. `between` is the disagreement between members, `within` the mean of their own.

    `fit` trains one member after the other, each as if alone: member m with seed + m, in the folder `member-m`.

    Args:
        members: Two or more models of one class with the same number of components, or networks, initialised apart.
        likelihood: That of networks; default `Categorical`. Models have their own.

    >>> from ibnn import convert, nets
    >>> model = Ensemble([convert(nets.mlp(4, 3), components=2, seed=m) for m in range(4)])
    >>> model.components, model.predict(torch.ones(5, 4)).probs.shape
    (4, torch.Size([5, 3]))
    """

    def __init__(self, members: Sequence[nn.Module], likelihood: Likelihood | None = None) -> None:
        super().__init__()
        if any(not isinstance(member, nn.Module) for member in members):
            kind = type(members[0]).__name__
            raise TypeError(complaint("members", "models or networks", kind, "Pass them in a list."))
        if any(not hasattr(member, "each_draw") for member in members):
            members = [Plain(member, copy.deepcopy(likelihood) or Categorical()) for member in members]
        elif likelihood is not None:
            raise ValueError(complaint("likelihood", "left out for models", likelihood, "They have their own."))
        own = [id(p) for member in members for p in member.parameters()]
        if len(members) < 2 or len(set(own)) < len(own):
            got = f"{len(members)} with parameters in common" if len(members) > 1 else len(members)
            raise ValueError(complaint("members", "two or more separate networks", got, "Make each anew."))
        kinds = {(type(m).__name__, m.components, type(m.likelihood).__name__) for m in members}
        if len(kinds) > 1 or isinstance(members[0], Ensemble):
            remedy = "Make all members alike: one class, number of components and likelihood; no ensembles."
            raise ValueError(complaint("members", "models of one kind", sorted(kinds), remedy))
        self.members: Any = nn.ModuleList(members)
        for member in members:
            member._lock = self._lock
        first: Any = self.members[0]
        self.likelihood = mixing(first.likelihood).to(next(first.parameters()).device)
        for heads in [self.likelihood, *(member.likelihood for member in self.members)]:
            if isinstance(heads, Heads):  # the first one packs targets for all
                heads._shapes["y"] = first.likelihood._shapes["y"]
        self.components, self.per_sample = len(members), int(first.components)  # draws of a member's sample
        self.training = first.training

    @property
    def net(self) -> nn.ModuleList:
        """The members' networks."""
        return nn.ModuleList(member.net for member in self.members)

    @property
    def random(self) -> bool:
        """Whether a member has more than one draw."""
        return self.per_sample > 1 or any(member.random for member in self.members)

    @property
    def examples(self) -> Tensor:
        """Training examples that the first member has seen."""
        return self.members[0].examples  # type: ignore[no-any-return]

    @one_at_a_time
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns one output that stands for all members: for their draws, in train mode for a noisy pass of each."""
        if self.training:
            self.reference = self.held_out = None
            noisy = [member.likelihood.read(member(*args, **kwargs))[None] for member in self.members]
        else:
            own = [(m, getattr(m, "eval_samples", 1) or 1, getattr(m, "eval_seed", 0)) for m in self.members]
            noisy = [member.draw_logits(kwargs or args, samples, seed) for member, samples, seed in own]
        scaled = [self._unit(member, drawn) for member, drawn in zip(self.members, noisy, strict=True)]
        return self.likelihood.combine(torch.cat(scaled))

    @one_at_a_time
    def elbo(self, x: Inputs, y: Any, **options: Any) -> ELBO:
        """Returns the mean of the members' terms; each member's gradient is that of its own loss, not of the mean."""
        self.reference = self.held_out = None
        elbos = [member.elbo(x, y, **options) for member in self.members]
        loss, *terms = map(torch.stack, zip(*elbos, strict=True))
        total = loss.sum()
        return ELBO(total - (total - loss.mean()).detach(), *(part.mean() for part in terms))

    def parameter_groups(self, *args: Any, **options: Any) -> list[dict[str, Any]]:
        """Returns the groups of all members, as `IBNN.parameter_groups` does."""
        return [group for member in self.members for group in member.parameter_groups(*args, **options)]

    def each_draw(
        self,
        x: Inputs,
        samples: int = 5,
        seed: int = 0,
        *,
        first: int = 0,
        batch_size: int | None = None,
        components: Sequence[int] | None = None,
    ) -> Iterator[Tensor]:
        """Yields draws of every member, (J, B, …), as the ensemble's likelihood reads them; see `IBNN.each_draw`."""
        for number in range(self.components) if components is None else components:
            member, own = self.members[number], numbered_seed(seed, number)
            for drawn in member.each_draw(x, samples, own, first=first, batch_size=batch_size):
                yield self._unit(member, drawn)

    def mean_output(self, x: Inputs) -> Tensor:
        """Returns the mean of the members' outputs at their means."""
        return torch.stack([self._unit(member, member.mean_output(x)[None])[0] for member in self.members]).mean(0)

    def reseed(self, seed: int) -> None:
        """Starts the noise of every member's training anew."""
        check.seed(seed)
        for number, member in enumerate(self.members):
            member.reseed(seed + number)

    def _unit(self, member: Any, draws: Tensor) -> Tensor:
        """Returns a member's outputs (J, B, …) at temperature 1, with their noise where it is a Gaussian's."""
        return on_one_scale(draws, member.likelihood, self.likelihood)
