"""The GPUs that a rollout worker tells the scheduler of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heddle_dask.engines.gpus import named_gpus
from heddle_dask.engines.spec import EngineSpec, engine_kind


def visible_gpus(spec: EngineSpec, environ: Mapping[str, str]) -> Sequence[str]:
    """The GPUs that this process sees, by name; none where it does not name them, or where the engine uses none."""
    if not engine_kind(spec.kind).uses_gpus():
        return []
    return list(named_gpus(environ) or ())
