"""Whether a strategy has an optional part of its contract (a runtime protocol of methods, `core.view`)."""

from __future__ import annotations

import functools
from typing import Any, TypeGuard, TypeVar

P = TypeVar("P")
_of_class: Any = functools.cache(issubclass)


def offers(strategy: object, part: type[P]) -> TypeGuard[P]:
    """As ``isinstance``, which takes 20 µs for a protocol; asked once for each class, and not at every event."""
    return bool(_of_class(type(strategy), part))
