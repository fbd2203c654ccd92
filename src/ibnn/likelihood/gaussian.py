"""The likelihood of real targets with Gaussian noise."""

import math
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ibnn import check
from ibnn.errors import complaint
from ibnn.likelihood.base import Likelihood, Temperature, Terms, as_rows, by_row, check_shape, full, like_rows
from ibnn.likelihood.categorical import fallen_back
from ibnn.likelihood.running import standard_error
from ibnn.prediction import Conformal, GaussianPrediction, number_distances

FAR = 4.0  # root mean square of targets from which, and below whose inverse, outputs get units of their own
LITTLE = 0.05  # spread of outputs, in standard deviations of the targets, below which they are not in targets' units


class Gaussian(Likelihood):
    """Real targets of the shape of the output's mean, with Gaussian noise.

    The noise is one learnt number per output (`noise="learnt"`), or the network predicts it (`noise="predicted"`): then
    the last axis of its output holds the means first and as many noise parameters after them, variance = softplus.

    Mean = `location` + `scale` · output, and likewise noise = `scale` · that of the output. `ibnn.fit` sets both where
    they are not given (see `standardise`). Predictions and NLLs are in units of the targets.

    >>> likelihood = Gaussian(init_std=1.0)
    >>> round(likelihood.terms(torch.zeros(2, 1), torch.zeros(2, 1)).nll.item(), 4)  # ½ log 2π
    0.9189
    """

    log_std: Tensor | None
    location: Tensor
    scale: Tensor
    discrete = False

    def __init__(
        self,
        *,
        noise: Literal["learnt", "predicted"] = "learnt",
        init_std: float = 1.0,
        outputs: int = 1,
        location: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        """Chooses where the noise comes from.

        Args:
            noise: "learnt" or "predicted".
            init_std: Where learnt noise starts, in units of the target over `scale`.
            outputs: How many outputs have a learnt noise of their own; 1 shares one noise between all.
            location: Mean of the targets, if outputs are to be standardised.
            scale: Their standard deviation.
        """
        super().__init__()
        check.choice("noise", noise, ("learnt", "predicted"))
        check.number("init_std", init_std, above=0, remedy="Pass the target's standard deviation.")
        check.number("scale", scale, above=0, remedy="Pass the target's standard deviation.")
        self.noise = noise
        self.log_std = nn.Parameter(torch.full((outputs,), math.log(init_std))) if noise == "learnt" else None
        self.register_buffer("location", torch.tensor([float(location)]))
        self.register_buffer("scale", torch.tensor([float(scale)]))

    @property
    def options(self) -> dict[str, Any]:
        """Where the noise comes from, and how many there are."""
        return {"noise": self.noise, "outputs": 1 if self.log_std is None else len(self.log_std)}

    def split(self, output: Tensor, temperature: Temperature = None) -> tuple[Tensor, Tensor]:
        """Returns the mean and the standard deviation in an output, of equal shape."""
        output, factor = full(output), self._resolve(temperature)
        location, scale = self.location.to(output.dtype), self.scale.to(output.dtype)
        if self.log_std is not None:
            mean, std = output, self.log_std.to(output.dtype).exp()
        else:
            mean, raw = output.chunk(2, dim=-1)
            std = (F.softplus(raw) + 1e-6).sqrt()  # the floor keeps the loss finite on targets fitted exactly
        return location + scale * mean, (std * factor * scale).expand_as(mean)

    @torch.no_grad()
    def standardise(self, output: Tensor, target: Tensor) -> None:
        """Sets location and scale to the mean and standard deviation of targets that are far from unit size.

        Location and scale that were given stay. So do those of an output that is in units of its targets already: it
        varies as they do, around their mean. A noise other than the default keeps its size in units of the target.

        >>> likelihood = Gaussian()
        >>> likelihood.standardise(torch.zeros(3, 1), torch.tensor([[9000.0], [10000.0], [11000.0]]))
        >>> likelihood.location.item(), round(likelihood.scale.item())
        (10000.0, 816)
        """
        if bool(self.location.any()) or bool((self.scale != 1).any()):
            return
        rows, outputs = as_rows(target), as_rows(self.split(output)[0])
        mean, std = rows.mean(0), rows.std(0, correction=0)
        size, error = rows.square().mean(0).sqrt(), (rows - outputs).square().mean(0).sqrt()
        near = (error < 2 * std) & ((outputs.std(0, correction=0) > LITTLE * std) | (mean.abs() > 3 * std))
        changed = ((size > FAR) | (size < 1 / FAR)) & ~near & (std > 0)
        self.location = torch.where(changed, mean, 0.0).to(self.temperature)
        self.scale = torch.where(changed, std, 1.0).to(self.temperature)
        if self.log_std is not None and bool(self.log_std.any()):
            logs = self.scale.log()
            self.log_std -= logs if len(self.log_std) == len(logs) else logs.mean()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("location", "scale"):
            if (loaded := state_dict.get(prefix + name)) is not None:
                setattr(self, name, torch.empty_like(loaded, device=self.temperature.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def check_dtype(self, target: Tensor) -> None:
        """Raises if targets are not floating point."""
        if not target.is_floating_point():
            raise TypeError(complaint("y", "floating point", f"dtype {target.dtype}", "Pass y.float()."))

    def check(self, output: Tensor, target: Tensor) -> None:
        """Raises if targets are not finite real numbers of the mean's shape."""
        shape = f"an output of shape {tuple(output.shape)}"
        if self.log_std is None and output.shape[-1] % 2:
            expected = 'a network whose last axis has means and as many variances (noise="predicted")'
            raise ValueError(complaint("net", expected, shape, "Double the outputs of its last layer."))
        if self.log_std is not None and len(self.log_std) not in (1, output.shape[-1]):
            got = f"{len(self.log_std)} for {shape}"
            raise ValueError(complaint("outputs", "1 or the size of the network's last axis", got, "Pass outputs=1."))
        self.check_dtype(target)
        check_shape(self.split(output)[0], target)
        limit = min(torch.finfo(full(output).dtype).max ** 0.5 / 10, torch.finfo(self.scale.dtype).max)
        if not bool((good := target.abs() <= limit).all()):
            expected = f"finite numbers up to {limit:.1g} for a network of {output.dtype}"
            remedy = "Drop the rows without a target, or divide targets by their size."
            raise ValueError(complaint("y", expected, f"{target[~good][0].item():.3g}", remedy))

    def terms(self, output: Tensor, target: Tensor, temperature: Temperature = None) -> Terms:
        """Returns −log N(target; mean, std²), mean over all targets."""
        mean, std = self.split(output, temperature)
        loss = (0.5 * ((target - mean) / std).square() + std.log()).mean() + 0.5 * math.log(2 * math.pi)
        return Terms.plain(loss, target)

    def combine(self, draws: Tensor, temperature: Temperature = None) -> Tensor:
        """Returns the predictive mean."""
        return self.split(draws, temperature)[0].mean(0)

    def summarise(self, draws: Tensor, temperature: Temperature = None) -> GaussianPrediction:
        """Returns mean and variance, split by the law of total variance, and the mixture itself for intervals."""
        means, stds = self.split(draws, temperature)  # (K, S, B, …)
        by_component = means.mean(1)
        return GaussianPrediction(
            mean=by_component.mean(0),
            aleatoric=stds.square().mean((0, 1)),
            between=by_component.var(0, correction=0),
            within=means.var(1, correction=0).mean(0),
            standard_error=standard_error(means),
            draw_means=means.flatten(0, 1),
            draw_stds=stds.flatten(0, 1),
        )

    def losses(self, draws: Tensor, target: Tensor, temperature: Temperature = None) -> tuple[Tensor, Tensor]:
        """Returns the sum of −log p(target) and the number of targets of each row; see `Likelihood.losses`."""
        losses = -self.summarise(draws, temperature).log_prob(target)
        return by_row(losses), by_row(torch.ones_like(losses))

    def score(self, prediction: GaussianPrediction, target: Tensor) -> dict[str, float]:
        """NLL of the mixture, and root mean squared error."""
        nll = -prediction.log_prob(target).mean()  # refuses a target of another shape
        return {"nll": nll.item(), "rmse": (prediction.mean - target).square().mean().sqrt().item()}

    def surprise(self, output: Tensor) -> Tensor | None:
        """Returns the mean log standard deviation that the network predicts; None where it is the same for all."""
        if self.log_std is not None:
            return None
        return self.split(output, 1.0)[1].log().reshape(output.shape[0], -1).mean(1)

    def distances(self, prediction: GaussianPrediction, target: Tensor) -> list[Conformal | None]:
        """Returns distances from the mean in standard deviations; numbers of outputs (B, numbers) have own limits."""
        return [number_distances((target - prediction.mean).abs() / prediction.std)]

    def base_rates(self, target: Tensor) -> Tensor:
        """Returns mean and standard deviation of each output's targets; of all where they have more than one axis."""
        rows = as_rows(target)
        return torch.cat([rows.mean(0), rows.std(0, correction=0).clamp_min(1e-6)])

    def fall_back(self, prediction: GaussianPrediction, weight: Tensor, base: Tensor) -> GaussianPrediction:
        """Returns a mixture with the targets' own Gaussian as one more draw; see `Likelihood.fall_back`."""
        mean, std = (part.to(prediction.mean).expand_as(prediction.mean) for part in base.chunk(2))
        w = like_rows(weight, mean).expand_as(mean)
        centre = w * prediction.mean + (1 - w) * mean
        spread = w * (prediction.variance + prediction.mean.square()) + (1 - w) * (std.square() + mean.square())
        total = (spread - centre.square()).maximum(w * prediction.variance)
        return replace(
            prediction,
            mean=centre,
            draw_means=torch.cat([prediction.draw_means, mean[None]]),
            draw_stds=torch.cat([prediction.draw_stds, std[None]]),
            draw_weights=torch.cat([(w / len(prediction.draw_means)).expand_as(prediction.draw_means), (1 - w)[None]]),
            **fallen_back(prediction, weight, total),
        )
