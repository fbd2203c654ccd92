"""Watches a model in use: which answers to withhold (`abstain`), and whether inputs have shifted (`ShiftMonitor`)."""

from ibnn.monitoring.abstention import Threshold, abstain
from ibnn.monitoring.shift import ShiftMonitor, fewest_scores

__all__ = ["ShiftMonitor", "Threshold", "abstain", "fewest_scores"]
