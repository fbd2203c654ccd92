"""How `make docs` builds the pages of this folder."""

import importlib

import ibnn

importlib.import_module("ibnn.app.serve.start")  # imported before autodoc sets TYPE_CHECKING

project, author, copyright = "ibnn", "The ibnn authors", "The ibnn authors"
release = version = ibnn.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"ibnn {release}"
html_static_path, html_css_files = ["_static"], ["tables.css"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
suppress_warnings = [
    "myst.xref_missing",  # links to files of the repository; tests/test_docs.py checks every link
    "ref.python",  # the type `bytes` next to fields of that name
]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
