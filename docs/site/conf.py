"""The site: docs/*.md as the guide, the Python reference from docstrings, and Doxygen's pages under cpp/.

`./dev docs` builds it; the built package ladon must be importable.
"""

import pathlib

import ladon

root = pathlib.Path(__file__).resolve().parents[2]

project = "Ladon"
author = "Ladon maintainers"
copyright = "2026, Ladon maintainers"  # noqa: A001
version = release = ladon.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["site"]
nitpicky = False

# Headings as targets of links, as on code hosts.
myst_heading_anchors = 4

autodoc_mock_imports = ["torch"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the stubs have them; here they would hide the names
add_module_names = False
napoleon_google_docstring = False
# Types in docstrings are words for readers, not names to be linked.
napoleon_use_param = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"Ladon {version}"
html_static_path = []  # the build puts figures.js and calculator.js there
html_show_sourcelink = False
html_copy_source = False


def tidy_docstring(app, what, name, obj, options, lines):
    """Leaves out what the compiled module and named tuples say of themselves."""
    if lines and lines[0].startswith("(self) ->"):
        lines[0] = f"``{lines[0].partition('-> ')[2]}``"
    elif lines and lines[0].startswith("Alias for field number"):
        lines[:] = []


def setup(app):
    app.connect("autodoc-process-docstring", tidy_docstring)
