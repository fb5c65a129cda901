"""What an engine that starts is doing, by what vLLM has printed so far."""

from __future__ import annotations

import re
from collections.abc import Iterable

COMPILING = "compiling"
# In the order in which a start goes through them. A line says what begins after it.
_PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("loading weights", re.compile(r"Starting to load model")),
    ("preparing the model", re.compile(r"Model loading took")),
    (COMPILING, re.compile(r"Starting torch\.compile|for vLLM's torch\.compile|Dynamo bytecode transform time")),
    ("measuring memory", re.compile(r"torch\.compile took|Profiling CUDA graph memory")),
    ("allocating the KV cache", re.compile(r"Available KV cache memory|KV cache size: ")),
    ("capturing graphs", re.compile(r"Capturing CUDA graphs")),
    ("warming up", re.compile(r"Graph capturing finished|Warming up|init engine \(")),
    ("opening its server", re.compile(r"Starting vLLM server|Starting vLLM API server|Application startup complete")),
)
_ORDER = {phase: number for number, (phase, _) in enumerate(_PHASES)}


def start_phase(lines: Iterable[str], before: str = "") -> str:
    """The furthest phase that the lines name; `before` where they name none further."""
    furthest = _ORDER.get(before, -1)
    for line in lines:
        for number, (_, pattern) in enumerate(_PHASES):
            if number > furthest and pattern.search(line):
                furthest = number
    return _PHASES[furthest][0] if furthest >= 0 else before


def has_compiled(phase: str) -> bool:
    """Whether an engine in this phase compiles no more."""
    return _ORDER.get(phase, -1) > _ORDER[COMPILING]
