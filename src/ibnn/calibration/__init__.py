"""Noise and temperature of a trained network, chosen on held-out labels without training."""

from ibnn.calibration.report import Calibration, Point
from ibnn.calibration.search import calibrate, choose

__all__ = ["Calibration", "Point", "calibrate", "choose"]
