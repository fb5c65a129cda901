"""Text of models, tools and files on a terminal: its control characters are shown, and do nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from heddle_dask.core.errors import escaped


class SafeConsole(Console):
    """A console that escapes whatever it prints; its own styles stay."""

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        for segment in super().render(*args, **kwargs):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))
