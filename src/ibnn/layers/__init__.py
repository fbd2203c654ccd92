"""Which layers carry latents, and how a latent meets each of them."""
