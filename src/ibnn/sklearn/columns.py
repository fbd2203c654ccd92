"""Tables as they come: data frames with categories, missing values and numbers become arrays of numbers."""

from typing import Any

import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder

CATEGORIES = 30  # most columns that one column of categories becomes; rarer ones share the last


def is_mixed(x: Any) -> bool:
    """Returns whether x is a data frame with columns that are not numbers: categories, strings, dates.

    >>> is_mixed(np.zeros((2, 2)))
    False
    """
    return hasattr(x, "dtypes") and hasattr(x, "columns") and not all(_numeric(kind) for kind in x.dtypes)


def _numeric(kind: Any) -> bool:
    """Returns whether a column of this dtype holds numbers; booleans do."""
    kind = getattr(kind, "numpy_dtype", kind)  # pandas' own nullable kinds
    return isinstance(kind, np.dtype) and kind.kind in "biuf"


def encoder(x: Any) -> ColumnTransformer:
    """Returns an unfitted encoder for rows like these.

    A missing number becomes its column's median, and a column that says so; columns without a known number become 0. A
    category becomes a column of zeros and ones, missing ones have a column of their own, and those that were not seen
    in training have none.
    """
    kinds = list(x.dtypes) if is_mixed(x) else [np.dtype(float)] * x.shape[1]
    numbers = [place for place, kind in enumerate(kinds) if _numeric(kind)]
    others = [place for place in range(len(kinds)) if place not in numbers]
    filled = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    categories = OneHotEncoder(
        handle_unknown="infrequent_if_exist", max_categories=CATEGORIES, sparse_output=False, dtype=np.float64
    )
    return ColumnTransformer([("numbers", filled, numbers), ("categories", categories, others)])
