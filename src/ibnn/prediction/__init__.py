"""Draws of a method become answers with uncertainty."""

from ibnn.prediction.answers import (
    BernoulliPrediction,
    CategoricalPrediction,
    GaussianPrediction,
    JointPrediction,
    Prediction,
    check_level,
    no_reference,
)
from ibnn.prediction.conformal import Conformal, HeldOut, class_distances, number_distances
from ibnn.prediction.predict import check_fallback, check_options, draws, explaining_cuts, predict, refuse_nan

__all__ = [
    "BernoulliPrediction", "CategoricalPrediction", "GaussianPrediction", "JointPrediction", "Prediction",  # answers
    "Conformal", "HeldOut", "class_distances", "number_distances",
    "check_fallback", "check_level", "check_options", "draws", "explaining_cuts", "no_reference",
    "predict", "refuse_nan",
]  # fmt: skip
