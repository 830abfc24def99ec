"""The documentation: Sphinx with the furo theme, pages in MyST Markdown, the reference from the docstrings."""

from __future__ import annotations

from pathlib import Path

import tomllib

project = "pipelining_dualpipev"
copyright = "the pipelining_dualpipev authors, Apache-2.0"
author = "the pipelining_dualpipev authors"
version = release = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "pipelining_dualpipev"

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": False}
# The members that ScheduleDualPipeV inherits are torch's; what of them is kept is said in its own docstrings.
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # the fields of a NamedTuple are documented by autodoc already
