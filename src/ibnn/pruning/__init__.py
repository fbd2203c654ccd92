"""Compresses a network: removes the nodes that matter least."""

from ibnn.pruning.cutting import Size, rebuild, resize
from ibnn.pruning.pruning import Pruned, PrunedLayer, prune

__all__ = ["Pruned", "PrunedLayer", "Size", "prune", "rebuild", "resize"]
