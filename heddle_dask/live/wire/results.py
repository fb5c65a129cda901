"""The way of a result: to the scheduler in one message with the event of its end, and on in the driver's own stream.

The controller knows the end before the driver does, so what the driver asks for next never overtakes it. Dask's own
way, the scheduler's notice and then a fetch from the worker, remains for long results, and for those of a worker that
has lost our plugin.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Client

from heddle_dask.core.events import ActionFinished, StepFailed, StepFinished
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.codec import Message
from heddle_dask.live.wire.messages import ActionOutcome, Key, StepResult

# Longer ones would pass through the scheduler, whose event loop every step needs.
CARRIED_BYTES = 1 << 18

Result = StepResult | ActionOutcome
Ended = StepFinished | StepFailed | ActionFinished


@dataclass(frozen=True, slots=True)
class ResultReport(Message):
    """Worker to scheduler: a step or an action has ended.

    Sent before Dask's own message that the task is done, on the same stream.
    """

    session: str
    key: Key
    event: StepFinished | StepFailed | ActionFinished  # not stamped (`UNSTAMPED`)
    result: bytes  # `packed_result`


@dataclass(frozen=True, slots=True)
class ResultNotice(Message):
    """Scheduler to driver: the result of a step or an action; never an empty one."""

    session: str
    key: Key
    result: bytes


def packed_result(result: Result) -> bytes:
    """The result as it travels, which only the driver opens; empty where it is too long: the driver fetches it."""
    packed = pickle.dumps(result)
    return packed if len(packed) <= CARRIED_BYTES else b""


TakeResult = Callable[[Key, Any], None]
_takers: WeakKeyDictionary[Client, dict[str, TakeResult]] = WeakKeyDictionary()


def take_results(client: Client, session: str, take: TakeResult) -> None:
    """Hand the results of a session to `take` until `leave_results`: where one cannot be read, why."""
    if client not in _takers:
        takers: dict[str, TakeResult] = {}
        _takers[client] = takers

        def arrived(**mapping: Any) -> None:
            notice = ResultNotice.from_wire(mapping)
            taker = takers.get(notice.session)
            if taker is None:
                return  # the session has ended
            try:
                result = pickle.loads(notice.result)
            except Exception as error:  # Dask would log it, and the driver wait for ever
                result = error
            taker(notice.key, result)

        dask.add_client_handler(client, ResultNotice.op, arrived)
    _takers[client][session] = take


def leave_results(client: Client, session: str) -> None:
    """Drop what still comes of a session."""
    _takers[client].pop(session, None)
