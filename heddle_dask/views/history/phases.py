"""What a trajectory does at one moment: exactly one of these phases, so that its seconds add up.

Numbers, not an enumeration: the fold counts by them on every event.
"""

from __future__ import annotations

from typing import Final

ADMISSION: Final = 0
DRIVER: Final = 1
LLM_QUEUE: Final = 2
GENERATING: Final = 3
TOOL_QUEUE: Final = 4
TOOL: Final = 5
REWARD: Final = 6
MIGRATION: Final = 7
QUOTA: Final = 8
SERVICE_LOAD: Final = 9

PHASES: Final = (
    "admission",
    "driver",
    "llm queue",
    "generating",
    "tool queue",
    "tool",
    "reward",
    "migration",
    "quota",
    "service load",
)
"""Names by number; `docs/dashboard.md` tells what they mean."""
