"""Which layers carry latents, and how a latent meets each of them."""

from ibnn.layers.registry import layer_type, register_layer

__all__ = ["layer_type", "register_layer"]
