"""Draws of a method become answers with uncertainty."""

from ibnn.prediction.answers import (
    BernoulliPrediction,
    CategoricalPrediction,
    Collected,
    GaussianPrediction,
    JointPrediction,
    Prediction,
    Running,
)
from ibnn.prediction.conformal import Conformal, mass_above
from ibnn.prediction.predict import TOLERANCE, Method, Summary, draws, predict, refuse_nan

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
    "draws",
    "mass_above",
    "predict",
    "refuse_nan",
]
