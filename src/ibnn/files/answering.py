"""The module that an exported file is traced from: it maps inputs to answers with plain operators alone."""

import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ibnn._version import __version__
from ibnn.errors import complaint
from ibnn.inputs import Call, Inputs, Pick, batch_length, call_arguments, pick, tree_map
from ibnn.latent import Latent
from ibnn.layers.batch_axis import before_calls, find_batch
from ibnn.layers.registry import duplicate
from ibnn.likelihood import Heads, Likelihood
from ibnn.likelihood.mixing import on_one_scale
from ibnn.network import IBNN, by_layer, mean_latents, no_fast_path
from ibnn.normal import numbered_seed
from ibnn.novelty import Reference
from ibnn.novelty.measure import fallback_weight
from ibnn.novelty.nodes import observable, padding, watched
from ibnn.prediction import CategoricalPrediction, GaussianPrediction, JointPrediction, Prediction
from ibnn.units import Units, windows

Pixels = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation of each channel


class Drawn(nn.Module):
    """A network and its draws: it runs on a copy of the batch for each of them.

    With `mean`, a converted network has one more copy, at the posterior mean.
    """

    draw_bytes = 0  # size of the draws

    def __init__(self, model: Any, samples: int, seed: int, *, mean: bool) -> None:
        super().__init__()
        self.net = duplicate(model.net)
        for parameter in self.net.parameters():
            parameter.data = parameter.data.contiguous()  # runs keep channels last
        self.likelihood: Likelihood = copy.deepcopy(model.likelihood)
        self.logits: Pick | None = getattr(model, "logits", None)
        self.draws = self.copies = 1  # of the batch: those that answers are made of, and all
        self._draws: list[tuple[Tensor, Units | None]] = []  # of each layer, until the shapes of inputs are known
        if isinstance(model, IBNN):
            drawn = model.draw_latents(samples, seed)
            centre = [mean_latents(model).detach()[None]] if mean else []
            self.draws, self.copies = len(drawn), len(drawn) + len(centre)
            units = [unit and Units(unit.std.detach().cpu(), unit.words.cpu()) for unit in model._units(drawn)]
            for _, latent, z in by_layer(model, torch.cat([drawn.z.detach(), *centre])):
                self._draws.append((z.to(latent.mean.dtype).cpu().contiguous(), units[latent.number]))

    @torch.no_grad()
    def find_batch(self, x: Inputs) -> None:
        """Tells every latent which axis of its layer's input is the batch, and its draws; raises where none is."""
        args, kwargs = call_arguments(tree_map(self._repeated, x))
        latents = {name.rpartition(".")[0]: m for name, m in self.net.named_modules() if isinstance(m, Latent)}
        with no_fast_path():
            find_batch(self.net, latents, (args, kwargs))
            if copied := [name for name, latent in latents.items() if latent.copied]:
                got, remedy = f"copies of it in {copied}", "Leave these layers out: exclude=[…]."
                raise ValueError(complaint("net", "one that folds things into its batch row by row", got, remedy))
            layers = {name: self.net.get_submodule(name) for name in latents}
            shapes: dict[str, list[torch.Size]] = {name: [] for name in latents}
            with before_calls(layers, lambda name, shape, x: shapes[name].append(shape)):
                self.net(*args, **kwargs)
        for (name, latent), (z, units) in zip(latents.items(), self._draws, strict=True):
            factors = None if units is None else self._factors(latent, units, shapes[name]).to(z)
            self.draw_bytes += z.nbytes + (0 if factors is None else factors.nbytes)
            latent.hold(z, factors)
        self._draws = []

    def _factors(self, latent: Latent, units: Units, shapes: Sequence[Sequence[int]]) -> Tensor:
        """Returns the factors of a layer's units, (J, C, …); at the posterior mean they have no noise."""
        inner = list(shapes[0][latent.axis :])
        if any(list(shape[latent.axis :]) != inner for shape in shapes):
            got, remedy = f"called with {[*map(tuple, shapes)]}", 'Convert it with draws="channel".'
            raise ValueError(complaint(f"layer {latent.name!r}", "called with inputs of one size", got, remedy))
        factors = (1 + units.std * windows(units.words, math.prod(inner)).view(-1, *inner)).cpu()
        return torch.cat([factors, torch.ones(self.copies - len(factors), *inner)])

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Returns the outputs of all draws, (J, B, …), and that of the last copy of the batch."""
        args, kwargs = call_arguments(tree_map(self._repeated, x))
        output = self.likelihood.read(pick(self.net(*args, **kwargs), self.logits))
        by_copy = output.unflatten(0, (self.copies, -1))  # (J, B, …)
        return by_copy[: self.draws], by_copy[-1]

    def _repeated(self, x: Tensor) -> Tensor:
        return x.repeat(self.copies, *[1] * (x.dim() - 1)) if self.copies > 1 else x


class Answering(nn.Module):
    """Maps inputs to answers: summarises the outputs of a model's draws, or of those of an ensemble's members.

    If novelty is told, what layers see at the posterior mean is compared with the reference.
    """

    def __init__(
        self, model: Any, samples: int, seed: int, pixels: Pixels | None, novelty: bool, fallback: float | None = None
    ) -> None:
        super().__init__()
        self.name, self.components = type(model).__name__, model.components
        self.pixels, self.fallback = pixels, fallback
        self.reference: Reference | None = copy.deepcopy(getattr(model, "reference", None)) if novelty else None
        members, mean = getattr(model, "members", None), self.reference is not None
        self.mixed = members is not None
        seeds = [(model, seed)] if members is None else [(m, numbered_seed(seed, n)) for n, m in enumerate(members)]
        self.parts: Any = nn.ModuleList(Drawn(member, samples, own, mean=mean) for member, own in seeds)
        first: Any = self.parts[0]  # reads the outputs of several heads, and so knows their shapes
        self.likelihood: Any = copy.deepcopy(model.likelihood) if self.mixed else first.likelihood
        if self.reference is not None:
            self.observed, self.axes = self.reference.layers.tolist(), self.reference.axes.tolist()
            base, self.reference.base = self.reference.base.cpu(), torch.zeros(0)
            by_head = len(base) > 0 and isinstance(self.likelihood, Heads)
            self.base: Any = self.likelihood.rates_by_head(base) if by_head else base
        for name, values in zip(("centre", "spread"), pixels or (), strict=False):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1))

    def find_batch(self, x: Inputs) -> None:
        """Tells every latent which axis of its layer's input is the batch; raises where none is."""
        for part in self.parts:
            part.find_batch(self.normalised(x))
        if self.reference is not None:
            _ = self.reference.parts  # found before it is traced

    def forward(self, x: Inputs) -> dict[str, Tensor]:
        """Returns the answers to inputs by name."""
        x = self.normalised(x)
        with self._watched(call_arguments(x)) as seen:
            found = [part(x) for part in self.parts]
        (drawn, mean), *_ = found
        if self.mixed:
            both = [
                on_one_scale(torch.cat([drawn, mean[None]]), part.likelihood, self.likelihood)
                for part, (drawn, mean) in zip(self.parts, found, strict=True)
            ]
            drawn, mean = torch.cat([own[:-1] for own in both]), torch.stack([own[-1] for own in both]).mean(0)
        answer = self.likelihood.summarise(drawn.unflatten(0, (self.components, -1)))
        if self.reference is None:
            return named(answer)
        novelty = self.reference(list(seen.values()), self.likelihood.surprise(mean))
        return named(self.fallen_back(answer, novelty.p_value)) | {"p_value": novelty.p_value}

    def _watched(self, call: Call) -> AbstractContextManager[dict[str, Tensor]]:
        """Collects what layers see of the last copy of the batch."""
        if self.reference is None:
            return nullcontext({})
        net: Any = nn.ModuleList(part.net for part in self.parts) if self.mixed else self.parts[0].net
        all_layers = list(observable(net).items())
        layers = dict(all_layers[number] for number in self.observed)
        axes = dict(zip(layers, self.axes, strict=True))
        return watched(layers, axes, batch_length(call), padding(net, call), self.parts[0].copies)

    def fallen_back(self, answer: Any, p_value: Tensor) -> Any:
        """Returns what is answered to inputs of these p-values."""
        if self.reference is None or self.fallback is None:
            return answer
        weight = fallback_weight(p_value, self.fallback, self.reference.ranked)
        return self.likelihood.fall_back(answer, weight, self.base)

    def normalised(self, x: Inputs) -> Inputs:
        """Returns inputs as the network was trained on them."""
        return x if self.pixels is None else (x - self.centre) / self.spread

    def facts(self) -> dict[str, Any]:
        """Returns what the file says about itself."""
        facts = {"ibnn": __version__, "torch": torch.__version__, "method": self.name, "components": self.components}
        facts |= {"likelihood": type(self.likelihood).__name__, "temperature": self.likelihood.temperature.item()}
        facts |= {"pixels": self.pixels and {"mean": list(self.pixels[0]), "std": list(self.pixels[1])}}
        if self.reference is None:
            return facts
        held_out = self.reference.ranked
        says = "p-value: of inputs like the held-out ones a share of about p has p or less; near 0 for novel inputs"
        own = {"says": says, "held_out": held_out, "smallest": 1 / (held_out + 1), "fallback": self.fallback}
        return facts | {"p_value": own}


def named(answers: Prediction) -> dict[str, Tensor]:
    """Returns the outputs of the file by name."""
    if isinstance(answers, JointPrediction):
        by_head = {head: named(answer) for head, answer in answers.heads.items()}
        return {f"{head}.{name}": value for head, values in by_head.items() for name, value in values.items()}
    if isinstance(answers, GaussianPrediction):
        return {name: getattr(answers, name) for name in ("mean", "std", "aleatoric", "epistemic")}
    if not isinstance(answers, CategoricalPrediction):
        got, remedy = type(answers).__name__, "Summarise draws as these do."
        raise TypeError(complaint("likelihood", "one that answers as Categorical, Bernoulli or Gaussian", got, remedy))
    return {"probabilities": answers.probs} | {n: getattr(answers, n) for n in ("total", "aleatoric", "epistemic")}
