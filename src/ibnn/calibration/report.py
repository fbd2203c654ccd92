"""What `calibrate` chose, and how good that is."""

import math
from dataclasses import dataclass
from typing import NamedTuple

NOTEWORTHY = 0.05  # log of the ratio of temperatures, from which on the report mentions that one was shrunk


class Point(NamedTuple):
    """One scale: its NLL at temperature 1, its best temperature, and the NLL at that."""

    scale: float
    nll: float
    temperature: float
    tempered_nll: float


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` chose and how good it is; `print` it.

    Scores are the likelihood's own ("nll" always, "error" and "ece" for classes), on the labels that chose scale and
    temperature, so they are slightly optimistic. `cross_nll` is less so: each half of the labels is scored at the
    temperature that the other half fits. `after["nll"]` is never above `temperature_scaling["nll"]`, nor `cross_nll[1]`
    above `cross_nll[0]`.
    """

    curve: tuple[Point, ...]  #: The scales that were tried, in order, the first without noise; on the search's rows.
    scale: float  #: a, the chosen one. For latents that were never trained it is their standard deviation.
    temperature: float  #: T, the chosen one: what the labels support, shrunk towards the network's own.
    fitted_temperature: float  #: What these labels would set if they were many: the temperature of the lowest NLL.
    std: dict[str, float]  #: Mean standard deviation of the latents of each layer, by its name.
    unit_std: dict[str, float]  #: That of the factors of a layer's units, for layers whose units have some.
    reason: str  #: Why there is no noise; empty if there is some.
    before: dict[str, float]  #: Scores of the network as it came: without noise if its latents were never trained.
    temperature_scaling: dict[str, float]  #: Scores without noise at the best temperature.
    after: dict[str, float]  #: Scores from now on.
    cross_nll: tuple[float, float]  #: NLL without noise and of the calibrated network, cross-fitted over two halves.
    gain: tuple[float, float]  #: The first of these less the second, and that difference's standard error, in nats.
    rows: int  #: How many held-out rows there were.
    passes: float  #: Rows that went through the network, over `rows`.

    def __str__(self) -> str:
        """A table."""
        widths = {name: max(9, len(name) + 2) for name in self.after}
        lines = [f"{'':<12}" + "".join(f"{name:>{width}}" for name, width in widths.items())]
        entries = {"before": self.before, "temperature": self.temperature_scaling, "calibrated": self.after}
        for entry, scores in entries.items():
            lines.append(f"{entry:<12}" + "".join(f"{scores[name]:>{width}.4f}" for name, width in widths.items()))
        layers = f"latents: {_span(self.std)}"
        if self.unit_std:
            layers += f", of their units' factors: {_span(self.unit_std)}"
        (alone, noisy), (gain, error) = self.cross_nll, self.gain
        unit, per, digits = ("% of the NLL", 100 / alone, 1) if alone > 0 else ("nats", 1.0, 4)
        gained = f": gains {per * gain:.{digits}f} ± {per * error:.{digits}f} {unit}" if error else ""
        given_up = abs(math.log(self.temperature / self.fitted_temperature)) > NOTEWORTHY
        shrunk = f" ({self.fitted_temperature:.3g} fits these rows best: too few to support it)" if given_up else ""
        lines += [
            f"scale {self.scale:.3g} (standard deviation of the layers' {layers}), "
            f"temperature {self.temperature:.3g}{shrunk}, chosen on {self.rows:,} rows",
            f"NLL cross-fitted: temperature {alone:.4f}, calibrated {noisy:.4f}{gained}",
        ]
        return "\n".join([*lines, *filter(None, [self.reason])])


def _span(values: dict[str, float]) -> str:
    return f"{min(values.values()):.3g} … {max(values.values()):.3g}"
