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
from ibnn.prediction.method import TOLERANCE, Method, Summary, draws, predict
from ibnn.prediction.pieces import refuse_nan

__all__ = [
    "TOLERANCE",
    "BernoulliPrediction",
    "CategoricalPrediction",
    "Collected",
    "GaussianPrediction",
    "JointPrediction",
    "Method",
    "Prediction",
    "Running",
    "Summary",
    "draws",
    "predict",
    "refuse_nan",
]
