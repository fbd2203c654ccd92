"""Offers image sets as uint8 tensors, tables of points, batches, corruptions, and downloads.

Importing it needs only torch; functions import whatever else they need when they are called.
"""

from ibnn.data.corruptions import KINDS, corrupt
from ibnn.data.download import get
from ibnn.data.images import Folder, Images, Split, load_cifar10, load_cifar100, load_idx
from ibnn.data.sets import DataSet, Status, hold_out, load, names, status, subset
from ibnn.data.table_file import FileTable, read_table
from ibnn.data.tables import TABLES, Points, Standardisation, Table, toy_regression, two_moons

__all__ = ["DataSet", "Status", "get", "load", "names", "status"]  # image sets by name
__all__ += ["TABLES", "Points", "Table", "Standardisation", "toy_regression", "two_moons"]  # synthetic tables
__all__ += ["FileTable", "read_table"]  # tables of your own
__all__ += ["Folder", "Split", "load_cifar10", "load_cifar100", "load_idx"]  # files
__all__ += ["hold_out", "subset"]  # parts
__all__ += ["Images"]  # batches
__all__ += ["KINDS", "corrupt"]  # corruptions
