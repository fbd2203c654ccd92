"""Samples posteriors: HMC over the latents, and whether chains agree."""

from ibnn.sampling.chains import Samples, effective_size, split_rhat
from ibnn.sampling.hmc import DivergedChainError
from ibnn.sampling.loop import sample

__all__ = ["DivergedChainError", "Samples", "effective_size", "sample", "split_rhat"]
