"""Sphinx: `make docs`."""

project = "taskguard"
copyright = "the taskguard developers"  # noqa: A001  # Sphinx's name for it
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design"]
html_theme = "furo"
html_title = "taskguard"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
smartquotes = False  # they would be in code: busy=”retry” is no Python
exclude_patterns = ["_build"]
nitpicky = False


def _without_module_texts(_app, what, _name, _thing, _options, lines):
    """Leave out the docstrings of modules. They are for readers of the code."""
    if what == "module":
        lines.clear()


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _without_module_texts)
