"""METRICS: accuracy, calibration and usefulness of uncertainty, as pure functions of tensors on any device.

Numbers are computed in float64 on the CPU, except `rmse` and `coverage`, which keep the targets' precision.
"""

from ibnn.metrics.classification import (
    ReliabilityCurve,
    RiskCoverage,
    aurc,
    auroc,
    brier,
    ece,
    error,
    fpr_at_95_tpr,
    nll,
    reliability_curve,
    risk_coverage,
    scores,
)
from ibnn.metrics.regression import coverage, crps, interval_score, rmse
from ibnn.metrics.resampling import Interval, bootstrap, score_intervals

__all__ = [
    "Interval",
    "ReliabilityCurve",
    "RiskCoverage",
    "aurc",
    "auroc",
    "bootstrap",
    "brier",
    "coverage",
    "crps",
    "ece",
    "error",
    "fpr_at_95_tpr",
    "interval_score",
    "nll",
    "reliability_curve",
    "risk_coverage",
    "rmse",
    "score_intervals",
    "scores",
]
