"""LAYERS: which layers carry latents, and how a latent meets each of them."""

from ibnn.layers.registry import layer_type, register_layer
from ibnn.layers.sides import Output

__all__ = ["Output", "layer_type", "register_layer"]
