"""The module that an exported file is traced from: it maps inputs to answers with plain operators alone."""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ibnn._version import __version__
from ibnn.errors import complaint
from ibnn.inputs import Call, Inputs, Pick, batch_length, call_arguments, pick, tree_map
from ibnn.latent import Latent
from ibnn.layers.batch_axis import find_batch, input_shapes
from ibnn.layers.registry import duplicate
from ibnn.likelihood import Heads, Likelihood
from ibnn.likelihood.mixing import on_one_scale
from ibnn.network import IBNN, by_layer, mean_latents, no_fast_path
from ibnn.normal import numbered_seed
from ibnn.novelty import Reference
from ibnn.novelty.measure import fallback_weight
from ibnn.novelty.nodes import observable, padding, watched
from ibnn.prediction import CategoricalPrediction, GaussianPrediction, JointPrediction, Method, Prediction
from ibnn.units import Units, windows

Pixels = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation of each channel


class OneNetwork(Method, Protocol):
    """A method that draws nothing, such as `ibnn.baselines.Plain`, or an ensemble of what can be exported."""

    net: nn.Module  # of several components, an nn.ModuleList
    likelihood: Likelihood


class Answering(nn.Module):
    """Maps inputs to answers: runs the network on a copy of the batch for each draw and summarises the outputs.

    If novelty is told, a converted network has one more copy, at the posterior mean, whose layers' inputs are compared
    with the reference.
    """

    draw_bytes = 0  # size of the draws

    def __init__(
        self,
        model: IBNN | OneNetwork,
        samples: int,
        seed: int,
        pixels: Pixels | None = None,
        *,
        novelty: bool = True,
        fallback: float | None = None,
        mean: bool = False,
    ) -> None:
        """Takes a model and the options of `export`; `mean` adds a copy at the posterior mean without a reference."""
        super().__init__()
        self._draws: list[tuple[Tensor, Units | None]] = []  # of each layer, until the shapes of inputs are known
        self.fallback = fallback
        self.name, self.components, self.pixels = type(model).__name__, model.components, pixels
        self.likelihood: Likelihood = copy.deepcopy(model.likelihood)
        self.logits: Pick | None = getattr(model, "logits", None)
        told = novelty and getattr(model, "reference", None) is not None
        members = enumerate(getattr(model, "members", ()))
        options: Any = {"novelty": False, "mean": told}
        self.parts: Any = nn.ModuleList(Answering(m, samples, numbered_seed(seed, n), **options) for n, m in members)
        self.nets = nn.ModuleList([] if self.parts else [duplicate(model.net)])  # the only network
        for parameter in self.nets.parameters():
            parameter.data = parameter.data.contiguous()  # runs keep channels last
        self.reference: Reference | None = self._copied(getattr(model, "reference", None) if novelty else None)
        self.draws = self.copies = 1  # of the batch: those that answers are made of, and all
        if isinstance(model, IBNN):
            drawn = model.draw_each(samples, seed)
            centre = [mean_latents(model).detach()[None]] if told or mean else []
            self.draws, self.copies = len(drawn), len(drawn) + len(centre)
            units = [unit and Units(unit.std.detach().cpu(), unit.at.cpu()) for unit in model._units(drawn)]
            parts = by_layer(model, torch.cat([drawn.z.detach(), *centre]))
            own = [(part.to(latent.mean.dtype), units[latent.number]) for _, latent, part in parts]
            self._draws = [(z.cpu().contiguous(), unit) for z, unit in own]
        for name, values in zip(("centre", "spread"), pixels or (), strict=False):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1))

    def _copied(self, reference: Reference | None) -> Reference | None:
        """Returns a copy of the reference without what the file has no use for; notes its numbers."""
        if reference is None:
            return None
        own = copy.deepcopy(reference)
        self.observed, self.axes = own.layers.tolist(), own.axes.tolist()
        base = own.base.cpu()
        by_head = len(base) > 0 and isinstance(self.likelihood, Heads)
        self.base: Any = self.likelihood.rates_by_head(base) if by_head else base  # type: ignore[operator]
        own.base = torch.zeros(0)
        return own

    def _hold(self, latent: Latent, z: Tensor, units: Units | None, shapes: Sequence[Sequence[int]]) -> None:
        """Gives a latent its part of the draws in place of its distribution: z (J, D), and u (J, C, …) of its units."""
        factors = None
        if units is not None:
            inner = list(shapes[0][latent.axis :])
            if any(list(shape[latent.axis :]) != inner for shape in shapes):
                got, remedy = f"called with {[*map(tuple, shapes)]}", 'Convert it with draws="channel".'
                raise ValueError(complaint(f"layer {latent.name!r}", "called with inputs of one size", got, remedy))
            factors = 1 + units.std * windows(units.at, math.prod(inner)).view(-1, *inner)
            ones = torch.ones(self.copies - len(factors), *inner)  # at the posterior mean units have no noise
            factors = torch.cat([factors.cpu(), ones]).to(z)
            self.draw_bytes += factors.nbytes
        self.draw_bytes += z.nbytes
        latent.hold(z, factors)

    @torch.no_grad()
    def find_batch(self, x: Inputs) -> None:
        """Tells every latent which axis of its layer's input is the batch; raises where none is."""
        x = self.normalised(x)
        for part in self.parts:
            part.find_batch(x)
            self.draw_bytes += part.draw_bytes
        args, kwargs = call_arguments(tree_map(self._repeated, x))
        for net in self.nets:
            latents = {name.rpartition(".")[0]: m for name, m in net.named_modules() if isinstance(m, Latent)}
            layers = {name: net.get_submodule(name) for name in latents}
            with no_fast_path():
                find_batch(net, latents, (args, kwargs))
                if copied := [name for name, latent in latents.items() if latent.copied]:
                    expected, got = "one that folds things into its batch row by row", f"copies of it in {copied}"
                    remedy = "Stack the copies of a row beside each other, or leave these layers out: exclude=[…]."
                    raise ValueError(complaint("net", expected, got, remedy))
                with input_shapes(layers) as shapes:
                    net(*args, **kwargs)
            for (name, latent), (z, units) in zip(latents.items(), self._draws, strict=True):
                self._hold(latent, z, units, shapes[name])
            self._draws = []
        if self.reference is not None:
            _ = self.reference.parts  # found before it is traced

    def forward(self, x: Inputs) -> dict[str, Tensor]:
        """Returns the answers to inputs by name."""
        x = self.normalised(x)
        with self._watched(call_arguments(x)) as seen:
            drawn, mean = self.outputs(x)
        answer = self.likelihood.summarise(drawn.unflatten(0, (self.components, -1)))
        if self.reference is None:
            return named(answer)
        novelty = self.reference(list(seen.values()), self.likelihood.surprise(mean))
        return named(self.fallen_back(answer, novelty.p_value)) | {"p_value": novelty.p_value}

    def outputs(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Returns the outputs of all draws, (J, B, …), and that of the last copy of the batch."""
        if self.parts:
            found = [(part.likelihood, *part.outputs(x)) for part in self.parts]
            scaled = [on_one_scale(torch.cat([d, m[None]]), own, self.likelihood) for own, d, m in found]
            return torch.cat([both[:-1] for both in scaled]), torch.stack([both[-1] for both in scaled]).mean(0)
        args, kwargs = call_arguments(tree_map(self._repeated, x))
        output = self.likelihood.read(pick(self.nets[0](*args, **kwargs), self.logits))
        by_copy = output.unflatten(0, (self.copies, -1))  # (J, B, …)
        return by_copy[: self.draws], by_copy[-1]

    @contextmanager
    def _watched(self, call: Call) -> Iterator[dict[str, Tensor]]:
        """Collects what layers see of the last copy of the batch."""
        if self.reference is None:
            yield {}
            return
        net: Any = nn.ModuleList(part.nets[0] for part in self.parts) if self.parts else self.nets[0]
        copies = self.parts[0].copies if self.parts else self.copies
        all_layers = list(observable(net).items())
        layers = dict(all_layers[number] for number in self.observed)
        axes = dict(zip(layers, self.axes, strict=True))
        with watched(layers, axes, batch_length(call), padding(net, call), copies) as seen:
            yield seen

    def fallen_back(self, answer: Any, p_value: Tensor) -> Any:
        """Returns what is answered to inputs of these p-values."""
        if self.reference is None or self.fallback is None:
            return answer
        weight = fallback_weight(p_value, self.fallback, self.reference.ranked)
        return self.likelihood.fall_back(answer, weight, self.base)

    def _repeated(self, x: Tensor) -> Tensor:
        return x.repeat(self.copies, *[1] * (x.dim() - 1)) if self.copies > 1 else x

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
        wanted, remedy = "Categorical, Bernoulli or Gaussian, or to answer like them", "Summarise draws as they do."
        raise TypeError(complaint("likelihood", wanted, f"one that answers {type(answers).__name__}", remedy))
    return {"probabilities": answers.probs} | {n: getattr(answers, n) for n in ("total", "aleatoric", "epistemic")}
