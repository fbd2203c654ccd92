"""What layers' inputs are multiplied by in a pass."""

from ibnn.passes import Draws

__all__ = ["Draws"]
