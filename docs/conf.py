"""Sphinx builds these pages and checks the links of every page in the repository: make docs."""

project = "QuantMoE"
author = "the QuantMoE developers"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "custom_ops/**.md", "samples/*/README.md"]
exclude_patterns = ["build", ".*"]  # Sphinx follows links, and a folder of wine has one to /
myst_heading_anchors = 4
html_theme_options = {"page_width": "1200px", "sidebar_width": "240px"}
suppress_warnings = ["myst.header"]  # pages begin with their title, whatever its level
