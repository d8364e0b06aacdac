"""How Sphinx builds these pages; see CONTRIBUTING.md for the commands."""

import sys
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer

import enqueuer

# The extensions of this folder.
sys.path.insert(0, str(Path(__file__).parent))

project = "enqueuer"
author = "the enqueuer authors"
copyright = "2026, the enqueuer authors"
release = enqueuer.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "myst_parser",
    "name_links",
    "dark_pictures",
    "files",
    "messages",
    "sphinx_copybutton",
    "sphinx_design",
]
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
exclude_patterns = ["build"]
nitpicky = True
default_role = "literal"  # docstrings and pages write `name` as in Markdown

toc_object_entries_show_parents = "hide"
html_theme = "furo"
html_title = f"enqueuer {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style, pygments_dark_style = "tango", "monokai"
# A copied block has neither prompts nor output.
copybutton_exclude = ".linenos, .gp, .go"

python_maximum_signature_line_length = 90
autodoc_mock_imports = ["accelerate", "h5py", "jax", "keras", "tensorflow", "torch"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# The builds must not need a network, so names of other projects are not looked up.
nitpick_ignore_regex = [
    (r"py:.*", r"(collections|multiprocessing|np|numpy|os|queue|types|wave)\..*"),
    (
        r"py:.*",
        r"(enqueuer\..+\.)?(BaseEnqueuer|Batch|Counted|Indexable|Item|Origin|Path|Row|Self|SequenceStage|T|Weights)",
    ),
]

# The docstrings' examples see what their module sees; a name as in a plain script.
doctest_global_setup = """
from importlib.util import find_spec
from enqueuer import *
__name__ = "__main__"
"""


def setup(app):
    # Each overload has all options; the signature of the function itself has them once.
    analyze = ModuleAnalyzer.analyze

    def analyze_without_overloads(self):
        analyze(self)
        self.overloads = {}

    ModuleAnalyzer.analyze = analyze_without_overloads
    app.connect("autodoc-process-docstring", leave_out)


def leave_out(app, what, name, obj, options, lines):
    """Leave examples that need what is not installed here to pytest."""
    elsewhere = ("enqueuer.adapters.", "enqueuer.datasets.hdf5.")
    if app.builder.name == "doctest" and name.startswith(elsewhere):
        lines.clear()
