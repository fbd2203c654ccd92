"""Novelty detection: compares a network's activations with those of reference data."""

from ibnn.novelty.fitting import fit_novelty
from ibnn.novelty.measure import measure
from ibnn.novelty.reference import Novelty, Reference

__all__ = ["Novelty", "Reference", "fit_novelty", "measure"]
