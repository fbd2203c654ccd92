"""Samples posteriors: HMC over the latents, and whether chains agree."""

from ibnn.sampling.chains import effective_size, split_rhat
from ibnn.sampling.energy import DivergedChainError
from ibnn.sampling.loop import sample
from ibnn.sampling.samples import Samples
from ibnn.sampling.settings import SAMPLERS, Sampler, Settings

__all__ = ["SAMPLERS", "DivergedChainError", "Sampler", "Samples", "Settings", "effective_size", "sample", "split_rhat"]
