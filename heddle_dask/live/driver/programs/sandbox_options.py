"""What a program says of a sandbox, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.core.needs import Needs
from heddle_dask.core.resources import MEMORY
from heddle_dask.sandbox.stateful.contract import SandboxSpec, relative_path


def sandbox_spec(
    *,
    root: str,
    kind: str,
    files: Mapping[str, bytes | str] | None,
    setup: Sequence[str],
    memory: int | str,
    disk: int | str,
    network: bool,
    weak_allowed: bool,
    **limits: Any,
) -> SandboxSpec:
    """The description of a sandbox.

    Parameters
    ----------
    weak_allowed
        Whether a sandbox without a named kind may be one of plain processes, where there is no bubblewrap.

    Raises
    ------
    BadInput
    """
    if isinstance(setup, str) or not all(isinstance(each, str) for each in setup):
        raise BadInput(f"sandbox: setup is {setup!r}: use a list of commands")
    if not kind and not weak_allowed:
        kind = "bubblewrap"
    contents = {
        relative_path(path): content.encode() if isinstance(content, str) else bytes(content)
        for path, content in (files or {}).items()
    }
    return SandboxSpec(
        kind=kind,
        root=str(root),
        files=contents,
        setup=tuple(setup),
        memory_bytes=_size("memory", memory),
        disk_bytes=_size("disk", disk),
        network=bool(network),
        **limits,
    )


def _size(name: str, given: int | str) -> int:
    try:
        amounts = Needs(memory=given).demand()[MEMORY]
    except BadInput:
        amounts = None
    if amounts is None or amounts.elastic or amounts.least < 1:
        raise BadInput(f"sandbox: {name} is {given!r}: use bytes or a text such as '2 GiB'")
    return amounts.least
