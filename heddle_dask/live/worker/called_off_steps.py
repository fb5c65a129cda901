"""Steps that are stopped before the engine has them: they wait in the worker's own heap for a slot."""

from __future__ import annotations

from typing import Final

from distributed import Worker

from heddle_dask.engines.contract import VERSION_UNKNOWN, GenerateResult
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.messages import SLOT_RESOURCE, Key

NOT_BEGUN: Final = GenerateResult(
    token_ids=(),
    logprobs=(),
    finish_reason="abort",
    cached_tokens=0,
    policy_version=VERSION_UNKNOWN,
    queue_s=0.0,
    prefill_s=0.0,
    decode_s=0.0,
)
"""The result of such a step."""

# States in which Dask has done with a task.
_ENDED = ("memory", "error", "released", "forgotten")


class CalledOffSteps:
    """The steps of one rollout worker that are to start without a slot and to end at once."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._keys: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def call_off(self, key: Key) -> None:
        """Let a step that waits here start, and end before it goes to the engine; nothing if it is not here."""
        if key not in self._keys and dask.is_pending(self._worker, key):
            self._keys.add(key)
            # Otherwise the unit goes to the first in the queue, and this one, often the last, waits for all of them.
            dask.put_first(self._worker, key)
            dask.lend_resource(self._worker, SLOT_RESOURCE, 1)

    def transition(self, key: Key, finish: str) -> None:
        """Dask's task of the step has a new state."""
        if key in self._keys and finish in _ENDED:
            self._keys.discard(key)
            dask.lend_resource(self._worker, SLOT_RESOURCE, -1)
