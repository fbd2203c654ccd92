"""Draws of a method become answers with uncertainty."""

from ibnn.prediction.answers import (
    BernoulliPrediction,
    CategoricalPrediction,
    Collected,
    GaussianPrediction,
    JointPrediction,
    Prediction,
    Running,
    check_level,
    no_reference,
)
from ibnn.prediction.conformal import Conformal, HeldOut, class_distances, number_distances
from ibnn.prediction.predict import (
    TOLERANCE,
    Method,
    Summary,
    check_fallback,
    draws,
    explaining_cuts,
    predict,
    refuse_nan,
)

__all__ = [
    "TOLERANCE",
    "BernoulliPrediction",
    "CategoricalPrediction",
    "Collected",
    "Conformal",
    "GaussianPrediction",
    "HeldOut",
    "JointPrediction",
    "Method",
    "Prediction",
    "Running",
    "Summary",
    "check_fallback",
    "check_level",
    "class_distances",
    "draws",
    "explaining_cuts",
    "no_reference",
    "number_distances",
    "predict",
    "refuse_nan",
]
