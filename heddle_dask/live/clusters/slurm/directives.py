"""Options of ``sbatch`` as a group gives them: which of them a job may have, and the GPUs that they ask for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from heddle_dask.core.errors import BadInput

_GPUS = re.compile(r"(?:gres/)?gpu(?::[A-Za-z_][^:,=]*)?(?:[:=](\d+))?")
_GPU_DIRECTIVES = re.compile(r"(?:--gpus(?:-per-node|-per-task)?[= ]|-G ?)(?:[^:=]+:)?(\d+)")

# What the job script says itself, or what one job of one node cannot be.
_REFUSED_DIRECTIVES = {
    "--array": "job arrays are not supported: raise maximum instead",
    "-a": "job arrays are not supported: raise maximum instead",
    "--signal": "use drain: it sets when the job is told that it ends",
    "--requeue": "a lost job is replaced by a new one: leave it out",
    "--job-name": "jobs are named after the group: leave it out",
    "-J": "jobs are named after the group: leave it out",
    "--het-group": "heterogeneous jobs are not supported: use one group for each kind of node",
    "hetjob": "heterogeneous jobs are not supported: use one group for each kind of node",
}
# No separators of binds, and nothing that ends a string in double quotes or runs a command in it.
_NODE_PATH = re.compile(r"(/|\$[A-Za-z_]|\$\{[A-Za-z_]\w*\})(?:[\w./@%+=~-]|\$[A-Za-z_]|\$\{[A-Za-z_]\w*\})*")
_EXPORT = re.compile(r"[A-Za-z_]\w*(,[A-Za-z_]\w*)*")
_NODE_COUNTS = re.compile(r"(?:--nodes[= ]|-N ?)(\d+)(?:-(\d+))?")


def gpus_asked_for(gres: str | None, directives: Iterable[str]) -> int | None:
    """GPUs of one job by gres (``gpu:h100:4``) and directives (``--gpus-per-node=4``); None: they name none."""
    parts = [_GPUS.fullmatch(part.strip()) for part in (gres or "").split(",")]
    counts = [int(part[1] or 1) for part in parts if part is not None]
    asked = [_GPU_DIRECTIVES.match(directive) for directive in directives]
    counts += [int(match[1]) for match in asked if match is not None]
    return sum(counts) if counts else None


def check_directive(directive: str) -> None:
    """Refuse an option that the job script gives itself, or that a job of one node cannot have."""
    check_line("directives", directive)
    key = re.split(r"[= ]", directive.strip(), maxsplit=1)[0]
    if not key.startswith("-") and key != "hetjob":
        raise BadInput(f"directives has {directive!r}: give options of sbatch, such as --exclusive")
    if key in _REFUSED_DIRECTIVES:
        raise BadInput(f"directives has {directive!r}: {_REFUSED_DIRECTIVES[key]}")
    nodes = _NODE_COUNTS.fullmatch(directive.strip())
    if nodes is not None and int(nodes[2] or nodes[1]) > 1:
        raise BadInput(
            f"directives has {directive!r}: a job has one node, since an engine over several nodes is not supported"
        )


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse what is not among `allowed`; the message names the nearest."""
    if value not in allowed:
        near = get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise BadInput(f"{name} is {value!r}{hint}: use {', '.join(allowed)}")


def check_line(name: str, text: object) -> None:
    """Refuse what is no text of one line: it would become another line of the job script."""
    if not isinstance(text, str) or any(ord(sign) < 32 for sign in text):
        raise BadInput(f"{name} is {text!r}: use a text of one line, without control characters")


def check_node_path(name: str, path: str) -> None:
    """Refuse what is no absolute path on a node, in which the shell replaces variables and nothing else."""
    if not _NODE_PATH.fullmatch(path):
        raise BadInput(
            f"{name} is {path!r}: give an absolute path of letters, digits, variables ($NAME) and . _ - + = % @ ~"
        )


def check_export(export: str) -> None:
    """Refuse what is neither ALL, NONE nor names of variables: values are in the job script, and seen by others."""
    if not _EXPORT.fullmatch(export):
        raise BadInput(f"export is {export!r}: use ALL, NONE, or names of variables separated by commas")
