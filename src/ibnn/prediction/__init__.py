"""PREDICTION: draws of a method become answers with uncertainty."""

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
from ibnn.prediction.method import TOLERANCE, Method, Summary, draws, fallback_weight, fallen_back, known_share, predict
from ibnn.prediction.pieces import refuse_nan

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
    "fallback_weight",
    "fallen_back",
    "known_share",
    "mass_above",
    "predict",
    "refuse_nan",
]
