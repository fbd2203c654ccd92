"""How often does the shift monitor ring without a shift, and how soon with one? Prints (and with --json writes) both.

    python benchmarks/shift.py [--run RUN] [--json FILE]

Standard normal scores against 300 calibration scores, false_alarm=0.05 for the first question (1,000 scores each) and
0.01 for the second: scores that rise by some standard deviations, at once or after 1,000 calm ones. Half of the alarms
come within `median` scores of the shift, nine in ten within `most`.

With the folder of a finished run on images also: how soon with its test images inverted, at false_alarm=0.01, by
novelty as `ibnn serve` watches it, and by parts of the uncertainty of answers that do not fall back.
"""

from pathlib import Path

import report
import torch

import ibnn
from ibnn.app.predictor import Predictor
from ibnn.data import load
from ibnn.lab.parts import make_data
from ibnn.novelty import measure

CALIBRATION, STREAMS, LENGTH, REPEATS, SHIFTS, CALM = 300, 400, 1000, 40, (0.5, 1.0, 2.0), (0, 1000)


def delays(shift: float, calm: int, generator: torch.Generator) -> dict[str, int | None]:
    found = []
    for seed in range(REPEATS):
        scores = torch.randn(CALIBRATION + calm + LENGTH, generator=generator)
        monitor = ibnn.ShiftMonitor(scores[:CALIBRATION], false_alarm=0.01, seed=seed)
        monitor.update(scores[CALIBRATION : CALIBRATION + calm])
        if monitor.alarm is not None:
            continue  # a false one
        for score in scores[CALIBRATION + calm :] + shift:
            monitor.update(score[None])
            if monitor.alarm is not None:
                break
        found.append(monitor.alarm - calm if monitor.alarm is not None else LENGTH + 1)
    found.sort()
    values = {"median": found[len(found) // 2], "most": found[9 * len(found) // 10]}
    return {name: value if value <= LENGTH else None for name, value in values.items()}


def inverted(folder: Path) -> dict[str, dict[str, int]]:
    predictor = Predictor.read(folder)
    model, reference, options = (
        predictor.run.model,
        predictor.reference,
        {"samples": predictor.samples, "novelty": False},
    )
    valid = make_data(predictor.run.job, None).valid
    held = model.predict(valid.__getitems__(list(range(len(valid))))[0], **options)
    x = predictor.kind.prepared(1 - load(predictor.run.job.data).test.images.float() / 255)
    found = model.predict(x, **options)
    scores = {name: (getattr(held, name), getattr(found, name)) for name in ("epistemic", "total")}
    scores["novelty"] = (-reference.held_out_p_values().log(), -measure(model, x).p_value.log())
    result = {}
    for name, (calibration, stream) in scores.items():
        alarms = []
        for seed in range(REPEATS):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
            monitor = ibnn.ShiftMonitor(calibration, false_alarm=0.01, seed=seed)
            monitor.update(stream[order])
            alarms.append(monitor.alarm)
        alarms.sort()  # all ring
        result[name] = {"median": alarms[REPEATS // 2], "most": alarms[9 * REPEATS // 10]}
    return result | {"run": predictor.run.result["name"], "images": len(x)}


def main() -> None:
    """Simulates and prints."""
    parser = report.parser(__doc__)
    parser.add_argument("--run", type=Path, help="a finished run on images")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    rang = 0
    for seed in range(STREAMS):
        scores = torch.randn(CALIBRATION + LENGTH, generator=generator)
        monitor = ibnn.ShiftMonitor(scores[:CALIBRATION], false_alarm=0.05, seed=seed)
        monitor.update(scores[CALIBRATION:])
        rang += monitor.alarm is not None
    result: dict[str, object] = {"false_alarms": {"stated": 0.05, "found": rang / STREAMS, "streams": STREAMS}}
    result["delays"] = {str(s): {str(calm): delays(s, calm, generator) for calm in CALM} for s in SHIFTS}
    if options.run:
        result["inverted"] = inverted(options.run)
    recipe = {"calibration": CALIBRATION, "length": LENGTH, "repeats": REPEATS, "seed": 0}
    report.tell(result | {"recipe": recipe}, options.json)


if __name__ == "__main__":
    main()
