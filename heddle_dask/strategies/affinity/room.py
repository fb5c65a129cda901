"""Whether an engine has room for one more step, and the engines of a class."""

from __future__ import annotations

from collections.abc import Sequence

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.nouns import StepRequest


def has_room(engine: Engine, trajectory: Trajectory, step: StepRequest) -> bool:
    """Whether a slot is free there, and the context fits into the KV memory beside those of the residents.

    An engine that does not report its memory has only its slots as a limit.
    """
    if len(engine.inflight) >= engine.spec.slots:
        return False
    capacity = engine.spec.kv_capacity_tokens
    if capacity <= 0 or trajectory.home == engine.engine_id:
        return True
    return engine.resident_tokens + step.context_tokens <= capacity


def of_class(engines: Sequence[Engine], hardware: str) -> list[Engine]:
    """Those of one class, in their order."""
    return [engine for engine in engines if engine.spec.hardware == hardware]


def preferred(
    wanted: str, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]
) -> Sequence[Engine]:
    """The engines of the wanted class; another class only while all of that one are full.

    This is the fallback of RollArt (OSDI'26, sections 3.1 and 3.3). A trajectory that is at home in the wanted class
    stays there. One that had to go elsewhere returns as soon as there is room.

    Returns
    -------
    Sequence[Engine]
        Engines of the wanted class with room; all of that class if the trajectory is at home there, or if no engine at
        all has room; else engines of other classes with room. All candidates if none is of the wanted class.
    """
    own = of_class(candidates, wanted)
    if not own:
        return candidates
    if trajectory.home is not None and any(engine.engine_id == trajectory.home for engine in own):
        return own
    roomy = [engine for engine in own if has_room(engine, trajectory, step)]
    if roomy:
        return roomy
    others = [e for e in candidates if e.spec.hardware != wanted and has_room(e, trajectory, step)]
    return others or own


def returns_to(wanted: str, trajectory: Trajectory, allowed: Sequence[Engine]) -> bool:
    """Whether a step goes to the wanted class from another one: its KV cache then comes along."""
    if trajectory.home is None or not allowed or allowed[0].spec.hardware != wanted:
        return False
    return all(engine.engine_id != trajectory.home for engine in allowed)
