"""What a rollout shows of itself in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heddle_dask.core.notebook import facts_html

_SHOWN = ("environment", "model", "strategy", "samples", "seed", "out", "finished", "unfinished", "tokens")


def rollout_html(facts: Mapping[str, Any]) -> str:
    """Facts and progress of a rollout, by their names in the metadata of a run."""
    engine = facts.get("engine")
    shown: dict[str, object] = {name: facts.get(name) for name in _SHOWN[:3]}
    if facts.get("overrides"):
        shown["replaced parts"] = ", ".join(facts["overrides"])
    if isinstance(engine, Mapping):
        shown["engines"] = engine.get("kind")
    shown |= {name: facts.get(name) for name in _SHOWN[3:]}
    return facts_html("Rollout", shown)
