"""NOVELTY: is an input like those that a network knows? Its layers see."""

from ibnn.novelty.fitting import fit_novelty
from ibnn.novelty.reference import Novelty, Reference

__all__ = ["Novelty", "Reference", "fit_novelty"]
