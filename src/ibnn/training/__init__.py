"""Algorithm 1 and what surrounds it."""
