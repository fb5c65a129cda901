"""What crosses the wire between driver, scheduler and workers.

The scheduler opens every task graph it is given, so a call carries user functions and values only as pickled
bytes, and token ids only as the delta that the worker does not hold yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from heddle_dask.core.ids import StepId

Key = tuple[str, str, str, int, int]

# Messages wait this long for company instead of Dask's 2 to 10 ms: a step is on the critical path.
STREAM_INTERVAL_S = 0.0002
STEP_PREFIX = "llm"
ACTION_PREFIX = "tool"
ENGINE_RESOURCE = "ENGINE"  # on a worker that may host an engine
SLOT_RESOURCE = "LLM"  # published when its engine answers: one per slot, and for each step ahead
TOOL_RESOURCE = "TOOL"  # on a worker for actions: one per CPU
STEP_RESULTS = "heddle_step_results"  # RPC handlers through which workers push results to the driver
ACTION_RESULTS = "heddle_action_results"


def step_key(session: str, step_id: StepId) -> Key:
    """Dask key of a step. The prefix is the kind and never an id: Dask keeps prefixes for ever."""
    return (STEP_PREFIX, session, *step_id)


def action_key(session: str, action_id: str) -> Key:
    """Dask key of an action."""
    return (ACTION_PREFIX, session, action_id, 0, 0)


@dataclass(frozen=True, slots=True)
class StepCall:
    """One LLM step on its way to a rollout worker.

    Attributes
    ----------
    base_tokens, base_crc
        Length and CRC-32 of the context that the worker is expected to hold from the step before.
    delta
        Little-endian int32 ids that follow it. With ``base_tokens == 0`` this is the whole context.
    """

    session: str
    step_id: StepId
    base_tokens: int
    base_crc: int
    delta: bytes
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    ignore_eos: bool
    stop_token_ids: tuple[int, ...] = ()

    @property
    def body_bytes(self) -> int:
        """Length of what it carries."""
        return len(self.delta)

    @property
    def key(self) -> Key:
        """The Dask key this call runs under."""
        return step_key(self.session, self.step_id)


StepStatus = Literal["ok", "aborted", "engine-lost", "context-missing", "refused"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step. Ids are int32, logprobs float32, both little-endian bytes.

    Attributes
    ----------
    status
        ``"ok"``; ``"aborted"``: stopped on request, the tokens so far are here; ``"engine-lost"``: no answer,
        ask again; ``"context-missing"``: the worker lacks the base, ask again with the whole context;
        ``"refused"``: the engine will never take it, `message` says why.
    run_s
        Seconds from the start of the task on its worker to the engine's answer.
    engine_s
        What the engine says it took, its own queue included; NaN when it does not say.
    address
        Of the Dask worker that holds this result.
    """

    status: StepStatus
    engine_id: str = ""
    token_ids: bytes = b""
    logprobs: bytes = b""
    finish_reason: str = ""
    cached_tokens: int = 0
    policy_version: int = 0
    version_spans: tuple[tuple[int, int, int], ...] = ()
    queue_s: float = float("nan")
    prefill_s: float = float("nan")
    decode_s: float = float("nan")
    run_s: float = 0.0
    engine_s: float = float("nan")
    address: str = ""
    message: str = ""


# The end of an answered step as the controller must hear it: the step, and facts by name.
StepEnd = tuple[StepId, dict[str, Any]]


def step_end(call: StepCall, result: StepResult) -> StepEnd:
    """What the scheduler is told of a step that an engine answered; worker and driver tell the same."""
    return call.step_id, {
        "engine_id": result.engine_id,
        "new_tokens": len(result.token_ids) // 4,
        "cached_tokens": result.cached_tokens,
        "finish_reason": result.finish_reason,
        "policy_version": result.policy_version,
    }


@dataclass(frozen=True, slots=True)
class ActionCall:
    """One action on its way to a tool worker; `payload` is a cloudpickled (function, args, kwargs)."""

    session: str
    action_id: str
    payload: bytes
    timeout_s: float | None

    @property
    def body_bytes(self) -> int:
        """Length of what it carries."""
        return len(self.payload)

    @property
    def key(self) -> Key:
        """The Dask key this call runs under."""
        return action_key(self.session, self.action_id)


@dataclass(frozen=True, slots=True)
class ActionOutcome:
    """What came of an action: `value` is cloudpickled when `status` is ``"ok"``."""

    status: Literal["ok", "raised", "timeout", "aborted", "lost"]
    value: bytes = b""
    message: str = ""
    detail: str = ""
    host_id: str = ""
    cpus: int = 0
    run_s: float = 0.0
    address: str = ""


@dataclass(frozen=True, slots=True)
class PerKey:
    """A Dask annotation whose value differs per task of one batch; Dask calls it with the key."""

    values: dict[Any, Any] = field(default_factory=dict)

    def __call__(self, key: Any) -> Any:
        return self.values[key]
