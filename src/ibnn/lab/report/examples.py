"""EXAMPLES: the rows that the networks are most and least sure of, and what every draw says of them."""

from collections.abc import Sequence

from torch import Tensor

from ibnn.lab.report import figures
from ibnn.lab.report.markup import image, nothing, paragraph, run_name, section, text
from ibnn.lab.report.runs import Answers, Run, Shown, classifying

_SHOWN = 6  # of each kind


def examples(runs: Sequence[Run]) -> str:
    """The section: for every run its least and its most certain rows."""
    explanation = (
        "Each bar of an example is one draw of the network: the segments are its probabilities, in the order of the "
        "list below it. Where draws agree, the bars look alike; ragged borders are epistemic doubt."
    )
    html = []
    for number, run, test in classifying(runs):
        if run.shown is None:
            html.append(paragraph(f"{run.name} has stored no examples.", "note"))
            continue
        half = len(run.shown.rows) // 2
        certain, doubtful = range(half)[:_SHOWN], range(half, len(run.shown.rows))[-_SHOWN:]
        html.append(f"<h3>{run_name(run.name, number)}</h3>\n")
        for heading, rows in (("Least certain", list(reversed(doubtful))), ("Most certain", certain)):
            items = "".join(_example(run, test, run.shown, i) for i in rows)
            html.append(f'<h4>{heading}</h4>\n<ul class="examples">\n{items}</ul>\n' if items else "")
    return section("examples", "Most and least certain", explanation, html or [nothing("examples")])


def _example(run: Run, test: Answers, shown: Shown, i: int) -> str:
    row, draws = int(shown.rows[i]), shown.draws[i]
    true, guess = int(run.labels[row]), int(test.probs[row].argmax())
    mean = draws.mean(0)
    order = [c for c in mean.argsort(descending=True, stable=True).tolist() if mean[c] >= 0.01][:4] or [guess]
    votes = draws.argmax(1).bincount(minlength=draws.shape[1])
    said = [c for c in votes.argsort(descending=True, stable=True).tolist() if votes[c]][:3]
    tally = f"Of {len(draws)} draws " + ", ".join(f"{int(votes[c])} say {run.classes[c]}" for c in said)
    tally = tally if len(draws) > 1 else f"The only draw says {run.classes[said[0]]}"
    names = f"true {run.classes[true]}, predicted {run.classes[guess]}"
    pictures = (
        "" if shown.images is None else image(figures.photo(shown.images[i]), f"Test row {row}: {names}.", "photo")
    )
    pictures += image(
        figures.strips(draws, order), f"{tally}; the predicted class has {100 * float(mean[guess]):.0f} %.", "strips"
    )
    legend = [(run.classes[c], draws[:, c], figures.COLOURS[rank]) for rank, c in enumerate(order)]
    if 1 - float(mean[order].sum()) >= 0.005:
        legend.append(("all others", draws.sum(1) - draws[:, order].sum(1), figures.OTHER))
    lines = "".join(_share(name, p, colour) for name, p, colour in legend)
    verdict = "✓ right" if true == guess else "✗ wrong"
    parts = "" if test.parts is None else f", epistemic {float(test.parts[1:, row].sum()):.3f}"
    return (
        f'<li><div class="pair">{pictures}</div>\n<p><strong>{verdict}</strong>: predicted {text(run.classes[guess])}, '
        f'true {text(run.classes[true])}</p>\n<ul class="legend">{lines}</ul>\n'
        f'<p class="small">Test row {row}; total {float(test.total[row]):.3f} nats{parts}. {text(tally)}.</p></li>\n'
    )


def _share(name: str, probs: Tensor, colour: str) -> str:
    """A class in the list: its colour, its mean probability, and how far the draws are apart."""
    low, mean, high = (f"{100 * float(p):.0f}" for p in (probs.min(), probs.mean(), probs.max()))
    apart = f' <span class="small">(draws: {low}–{high} %)</span>' if len(probs) > 1 else ""
    return f'<li><span class="swatch" style="background:{colour}"></span>{text(name)} {mean} %{apart}</li>'
