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
from ibnn.prediction.conformal import Conformal, mass_above
from ibnn.prediction.predict import TOLERANCE, Method, Summary, check_fallback, draws, predict, refuse_nan

__all__ = [
    "TOLERANCE",
    "BernoulliPrediction",
    "CategoricalPrediction",
    "Collected",
    "Conformal",
    "GaussianPrediction",
    "JointPrediction",
    "Method",
    "Prediction",
    "Running",
    "Summary",
    "check_fallback",
    "check_level",
    "draws",
    "mass_above",
    "no_reference",
    "predict",
    "refuse_nan",
]
