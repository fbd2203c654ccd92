"""ESTIMATORS: scikit-learn's interface to `convert` and `fit`, with defaults for tables of 100 to a few thousand rows.

Inputs (and a regression's targets) are standardised inside. The network and its draws are in double precision, so that
the prediction for a row does not depend on the other rows. `random_state` decides everything random.
"""

from ibnn.sklearn.estimators import IBNNClassifier, IBNNRegressor, _OneClass
from ibnn.sklearn.table import PRIOR_STDS, Uncertainty

__all__ = ["PRIOR_STDS", "IBNNClassifier", "IBNNRegressor", "Uncertainty"]

for _public in (IBNNClassifier, IBNNRegressor, Uncertainty, _OneClass):
    _public.__module__ = __name__  # the name that pickles, from before this was a package, too, find them by
