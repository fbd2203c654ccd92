"""NOISE WITHOUT TRAINING: held-out labels choose a network's noise and temperature."""

from ibnn.calibration.choice import choose
from ibnn.calibration.report import Calibration, Point
from ibnn.calibration.search import calibrate

__all__ = ["Calibration", "Point", "calibrate", "choose"]
