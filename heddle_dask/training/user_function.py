"""A function of the user by ``package.module:function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from heddle_dask.core.errors import BadInput


def user_function(where: str, name: str, hint: str) -> Callable[..., Any]:
    """Import the function that a text names.

    Parameters
    ----------
    where, hint
        Of the message: which option it is, and what to use.

    Raises
    ------
    BadInput
        The text has another form, or the function cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise BadInput(f"{where} {name!r}: no such function: {hint}")
    try:
        function: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"{where} {name!r}: {error}: {hint}") from None
    if not callable(function):
        raise BadInput(f"{where} {name!r} is no function: {hint}")
    return function  # type: ignore[no-any-return]
