"""scikit-learn's interface to ensembles of iBNNs, with defaults for tables of 100 to some 10,000 rows.

Inputs, and a regression's targets, are standardised inside. The networks and their draws answer in double precision, so
that the prediction for a row does not depend on the other rows. `random_state` decides everything random.
"""

from ibnn.sklearn.estimators import IBNNClassifier, IBNNRegressor
from ibnn.sklearn.table import Uncertainty

__all__ = ["IBNNClassifier", "IBNNRegressor", "Uncertainty"]
