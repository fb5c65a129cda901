"""Settings of the documentation site: `make docs`.

The source directory is the repository's root, so that a link between Markdown files is the same here and in any other
viewer of the repository. Nothing is fetched while the site is built, and its pages load nothing from other hosts.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from tempfile import TemporaryDirectory

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))  # the package of this checkout, whatever is installed
sys.path.insert(0, str(DOCS / "_extensions"))
# For the notebook: the package of this checkout, and `heddle` beside the interpreter.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(DOCS.parent), os.environ.get("PYTHONPATH")]))
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # of a progress bar that is not shown
# Not the profile of the user who builds the site.
# The kernel says at every start that its sockets on loopback are not encrypted.
_profile = TemporaryDirectory(prefix="heddle-docs-")
os.environ["IPYTHONDIR"] = _profile.name
(Path(_profile.name) / "profile_default").mkdir()
(Path(_profile.name) / "profile_default" / "ipython_kernel_config.py").write_text(
    'c.IPKernelApp.log_level = "ERROR"\n', encoding="utf-8"
)

project = "heddle_dask"
author = "the heddle_dask developers"
copyright = f"2026, {author}. Apache-2.0"
version = release = version_of("heddle-dask")

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx_click",
    "names_in_docstrings",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "README.md",
    "CHANGELOG.md",
    "benchmarks/*.md",
    "heddle_dask/workloads/recorded/README.md",
]
# Directories that are not even looked into.
exclude_patterns = [".*", "build", "dist", "runs", "tests", "workers", "docs/_*"]

# -- Markdown and the notebook ---------------------------------------------------------------------------

# Anchors of headings as other viewers of Markdown make them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
# A word after the language of a block says what a test does with it (tests/worlds/markdown_blocks.py).

# The notebook is stored without output. `-D nb_execution_mode=off` leaves its cells without.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

# -- docstrings ------------------------------------------------------------------------------------------

autosummary_generate = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 140
toc_object_entries = False  # each class has a heading
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
numpydoc_class_members_toctree = False
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
# A name in single backticks is a link or code: _extensions/names_in_docstrings.py.
default_role = "py:obj"

nitpicky = True

# -- other projects --------------------------------------------------------------------------------------
# Their inventories are stored, in the plain-text form, with the names that our docstrings use (tests/docs/
# test_inventories.py looks whether they exist): nothing is fetched while the site is built.

intersphinx_mapping = {
    name: (address, str(DOCS / "_inventories" / f"{name}.inv"))
    for name, address in {
        "python": "https://docs.python.org/3",
        "distributed": "https://distributed.dask.org/en/stable",
    }.items()
}

# -- pages -----------------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = "heddle_dask"
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
html_additional_pages = {"index": "to_index.html"}
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "header_links_before_dropdown": 6,
    "show_nav_level": 1,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
    "secondary_sidebar_items": ["page-toc"],
    "back_to_top_button": True,
}
