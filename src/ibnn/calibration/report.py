"""CALIBRATION RESULT: what a calibration chose, and how good that is."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Point(NamedTuple):
    """One scale: its NLL at temperature 1, its best temperature, and the NLL at that."""

    scale: float
    nll: float
    temperature: float
    tempered_nll: float


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` chose and how good it is; `print` it.

    Scores are the likelihood's own ("nll" always, "error" and "ece" for classes), of the labels that were chosen by:
    a scale and a temperature (and a number a layer) are fitted to them, so they flatter a little. `cross_nll` flatters
    less: each half of the labels is scored at the temperature that the other half fits, both at the chosen scale.
    `after["nll"]` is never above `temperature_scaling["nll"]`, nor `cross_nll[1]` above `cross_nll[0]` (unless
    calibrated without a temperature).

    Attributes:
        curve: The scales that were tried, in order.
        scale: a, the chosen one. For latents that were never trained it is their standard deviation.
        temperature: T, the chosen one.
        profile: Mean standard deviation of the latents of each layer, by its name.
        unit_profile: That of the factors of a layer's units, by its name, for layers whose units have some.
        profile_kept: Whether layers have scales of their own.
        reason: Why, or why not; and why it is no more than temperature scaling, if so.
        before: Scores of the network as it came: without noise if its latents were never trained.
        temperature_scaling: Scores without noise at the best temperature.
        after: Scores from now on.
        cross_nll: NLL of temperature scaling and of the calibrated network with the draws that answers are made of,
            cross-fitted over the two halves; of a network without temperature each half at the other half's scale.
        gain: The first of these less the second, and the standard error of that difference, in nats.
        rows: How many held-out rows it was chosen by.
        passes: What that took: rows that went through the network, those with a gradient three times, over `rows`.
    """

    curve: tuple[Point, ...]
    scale: float
    temperature: float
    profile: dict[str, float]
    unit_profile: dict[str, float]
    profile_kept: bool
    reason: str
    before: dict[str, float]
    temperature_scaling: dict[str, float]
    after: dict[str, float]
    cross_nll: tuple[float, float]
    gain: tuple[float, float]
    rows: int
    passes: float

    def __str__(self) -> str:
        """A table."""
        entries = {"before": self.before, "temperature": self.temperature_scaling, "calibrated": self.after}
        names = list(self.after)
        lines = [f"{'':<12}" + "".join(f"{name:>9}" for name in names)]
        lines += [f"{e:<12}" + "".join(f"{scores[name]:>9.4f}" for name in names) for e, scores in entries.items()]
        layers = f"latents: {_span(self.profile)}"
        if self.unit_profile:
            layers += f", of their units' factors: {_span(self.unit_profile)}"
        return "\n".join(
            [
                *lines,
                f"scale {self.scale:.3g} (standard deviation of the layers' {layers}), "
                f"temperature {self.temperature:.3g}, chosen on {self.rows:,} rows",
                "NLL cross-fitted: temperature {:.4f}, calibrated {:.4f}".format(*self.cross_nll) + self._gain,
                self.reason,
            ]
        )

    @property
    def _gain(self) -> str:
        """What is gained over temperature scaling, in words."""
        gain, error = self.gain
        if not error:
            return ""
        if (alone := self.cross_nll[0]) > 0:
            return f": gains {100 * gain / alone:.1f} ± {100 * error / alone:.1f} % of the NLL"
        return f": gains {gain:.4f} ± {error:.4f} nats"

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Draws the curve as a matplotlib figure; writes it to a file if a path is given."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        scales = [point.scale for point in self.curve]
        axes.plot(scales, [p.nll for p in self.curve], "o-", color="#56B4E9", ms=4, label="temperature 1")
        tempered = [p.tempered_nll for p in self.curve]
        axes.plot(scales, tempered, "o-", color="#0072B2", ms=4, label="best temperature of each scale")
        axes.axhline(self.temperature_scaling["nll"], color="#E69F00", lw=1, ls="--", label="temperature scaling")
        axes.plot([self.scale], [self.after["nll"]], "*", color="#D55E00", ms=14, label="chosen")
        top = min(max(p.nll for p in self.curve), 2.5 * max(min(tempered), 0.0) + max(tempered) - min(tempered))
        if top > min(tempered):
            axes.set_ylim(min(tempered) - 0.05 * (top - min(tempered)), top * 1.02)
        axes.set(xlabel="scale of the latents' noise", ylabel="held-out NLL (nats)")
        axes.legend(frameon=False, fontsize=9)
        if path is not None:
            figure.savefig(path, dpi=130)
        return figure


def _span(values: dict[str, float]) -> str:
    return f"{min(values.values()):.3g} … {max(values.values()):.3g}"
