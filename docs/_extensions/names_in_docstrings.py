"""Names in single backticks of docstrings, and types in signatures: links where a page describes them.

A docstring writes `BadInput` or `Budget.max_steps` without the module, since names of classes are unique in this
project. What no page describes is shown as code: a parameter, an attribute or a constant of the same docstring, and
anything that can be imported. A name that is none of these is a warning (`nitpicky`): it does not exist.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autosummary import ImportExceptionGroup, import_by_name


def resolved(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element) -> Any:
    """The link or the literal for a name that Sphinx has not found; None: there is no such thing."""
    if node.get("refdomain") != "py":
        return None
    target = str(node["reftarget"])
    entry = _described(env, target) or _described(env, target.rpartition(".")[0])
    if entry is not None:
        link = nodes.reference("", "", content, internal=True)
        address = app.builder.get_relative_uri(node.get("refdoc", env.docname), entry.docname)
        link["refuri"] = f"{address}#{entry.node_id}"
        return link
    address = _elsewhere(env, target)
    if address is not None:
        return nodes.reference("", "", content, internal=False, refuri=address)
    if node.get("reftype") == "class" or "[" in target:
        return content  # a type of an annotation
    if _is_local(target) or _can_be_imported(target, node.get("py:module")):
        return nodes.literal("", content.astext())
    return None


def _described(env: BuildEnvironment, name: str) -> Any:
    """The one class with this name, or the last part of it, that a page describes."""
    short = name.rpartition(".")[2]
    if not short[:1].isupper():
        return None
    objects = env.domains.python_domain.objects
    found = [at for full, at in objects.items() if full.rpartition(".")[2] == short and not at.aliased]
    return found[0] if len(found) == 1 else None


def _elsewhere(env: BuildEnvironment, name: str) -> str | None:
    """The address of a class of another project (docs/_inventories) with this name."""
    classes = getattr(env, "intersphinx_inventory", {}).get("py:class", {})
    found = [item.uri for full, item in classes.items() if full.rpartition(".")[2] == name]
    return found[0] if len(found) == 1 else None


def _is_local(name: str) -> bool:
    """Whether it can only be a parameter, an attribute of one, a constant, or no name at all."""
    first = name.partition(".")[0]
    return (first.islower() and first != "heddle_dask") or name.isupper() or not first.isidentifier()


def _can_be_imported(name: str, module: str | None) -> bool:
    try:
        import_by_name(name, [None, module, "heddle_dask"])
    except ImportExceptionGroup:
        return False
    return True


def without_empty_signature(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, str] | None:
    """No signature for a protocol: it is not instantiated."""
    return ("", "") if what == "class" and getattr(thing, "_is_protocol", False) else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Take names that Sphinx has not found, and signatures."""
    app.connect("missing-reference", resolved)
    app.connect("autodoc-process-signature", without_empty_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
