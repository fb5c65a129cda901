"""The registry of engine kinds.

A kind is one object that keeps `EngineKind`, in one file. The kinds of this package are listed in `ENGINE_KINDS`. A
kind of another package is named ``package.module:object``, which every process of a cluster can import.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.engine_kind import EngineKind
from heddle_dask.engines.kinds.emulated import EMULATED
from heddle_dask.engines.kinds.vllm import VLLM

ENGINE_KINDS: Mapping[str, EngineKind] = {"vllm": VLLM, "emulated": EMULATED}
"""Every kind of this package, by the name that `EngineSpec.kind` and ``--engine`` take."""


def engine_kind(name: str) -> EngineKind:
    """The kind of that name, or the object that ``package.module:object`` names.

    Raises
    ------
    BadInput
        There is none of that name, or the module or object cannot be imported.
    """
    kind = ENGINE_KINDS.get(name) if isinstance(name, str) else None
    if kind is not None:
        return kind
    module, separator, attribute = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not separator:
        known = " or ".join(ENGINE_KINDS)
        raise BadInput(f"engine kind {name!r} is unknown: use {known} (or package.module:object)")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (
        Exception,
        SystemExit,
        KeyboardInterrupt,
    ) as error:  # a module may raise anything during its import
        about_names = isinstance(error, ImportError | AttributeError)
        told = " ".join((f"{error}" if about_names else f"{type(error).__name__}: {error}").split())
        raise BadInput(f"engine kind {name!r} cannot be imported: {told}") from error
    if not isinstance(found, EngineKind):
        raise BadInput(
            f"engine kind {name!r} is a {type(found).__name__}, and no EngineKind (docs/engines.md)"
        )
    return found
