"""Sphinx builds these pages and checks the links of every page in the repository: make docs."""

import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
import generate

project = "QuantMoE"
author = "the QuantMoE developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "custom_ops/**.md", "samples/**README.md"]
# Sphinx follows links, and a folder of wine has one to /. Other pages include the tables
exclude_patterns = ["build", ".*", "docs/reference/tables"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "QuantMoE"
html_static_path = ["static"]
html_css_files = ["style.css"]
autodoc_typehints = "signature"
# pages begin with their title, whatever its level; names of arguments are also names of properties
suppress_warnings = ["myst.header", "ref.python"]


def index(app: Sphinx, failure: Exception | None) -> None:
    """Write an index.html at the root, which leads to the first page."""
    page = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=docs/index.html">'
    (Path(app.outdir) / "index.html").write_text(f'{page}<a href="docs/index.html">QuantMoE</a>\n', encoding="utf-8")


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", lambda app: generate.write())
    app.connect("build-finished", index)
