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
"""Names by number."""

PHASE_MEANINGS: Final = {
    "admission": "submitted, waits for admission",
    "driver": "its program runs on the driver, or a message is under way",
    "llm queue": "its step waits for an engine, or at the engine for a slot",
    "generating": "its step was sent to its engine: the engine's own queue, prefill and decode, which events do not "
    "tell apart",
    "tool queue": "all its actions wait for cores, memory or GPUs",
    "quota": "all its actions wait, one of them for the quota of an API",
    "service load": "all its actions wait, one of them for its model service to be loaded",
    "tool": "a tool runs",
    "reward": "its reward is computed",
    "migration": "its step waits for the end of a move: the part of the move that is not hidden",
}

# A step and an action may run at once; a step then counts.
STEP_PHASES: Final = frozenset({LLM_QUEUE, GENERATING, MIGRATION})
