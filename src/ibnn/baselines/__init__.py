"""The methods that iBNN is compared with.

Every method offers draws of its network's output to `ibnn.predict` and an objective with named terms to `ibnn.fit`.
Temperature scaling can be added to any of them; SWA is `fit` with `swa=0.75` on a `Plain`.
"""

from ibnn.baselines.ensemble import Ensemble
from ibnn.baselines.plain import Plain, scale_temperature
from ibnn.baselines.stochastic import SWAG, MCDropout, MeanField
from ibnn.files.saving import register_method

register_method(Ensemble, MCDropout, MeanField, Plain, SWAG)

__all__ = ["Ensemble", "MCDropout", "MeanField", "Plain", "SWAG", "scale_temperature"]
