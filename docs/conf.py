"""Sphinx configuration: ``sphinx-build -W -n -b html docs docs/_build``. Needs no network."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE / "_ext")]

# The cells of the pages run in their own processes. They mostly compile tiny programs.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ.setdefault("XLA_FLAGS", FLAGS)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# A debugger's note about frozen modules would be an output of the first cell.
os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")

import specjax  # noqa: E402  (after the environment)

project = "specjax"
author = "the authors of specjax"
project_copyright = "the authors of specjax, Apache-2.0"
release = version = specjax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.doctest",
    "sphinx_copybutton",
    "generated_pages",
]
exclude_patterns = ["_build", "_ext", "_generated", "jupyter_execute", "**/.ipynb_checkpoints"]

# Pages.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
smartquotes = False
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_in_temp = True
# The notebooks are stored with their outputs; tests/test_notebooks.py executes them.
nb_execution_excludepatterns = ["notebooks/*"]
nb_merge_streams = True
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

# The reference.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
add_module_names = False
toc_object_entries_show_parents = "hide"
# Names of other packages are not looked up: that would need the network. Private helpers have no
# page.
nitpick_ignore_regex = [
    ("py:.*", r"(?!specjax\.).*"),
    ("py:.*", r"specjax\.(.*\.)?_.*"),
]

html_theme = "furo"
html_title = f"specjax {release}"
html_static_path = ["_static"]
html_css_files = ["specjax.css"]
html_show_sourcelink = False
