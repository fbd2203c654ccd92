"""Watches a model in use: which answers to withhold (`abstain`), and what to do about a stream that changes.

`ShiftMonitor` finds out whether inputs have shifted, `AdaptiveLevel` keeps sets and intervals right if they do.
"""

from ibnn.monitoring.abstention import Threshold, abstain, rows_needed
from ibnn.monitoring.adaptive import AdaptiveLevel
from ibnn.monitoring.shift import ShiftMonitor, fewest_scores

__all__ = ["AdaptiveLevel", "ShiftMonitor", "Threshold", "abstain", "fewest_scores", "rows_needed"]
