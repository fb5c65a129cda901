"""Steps and actions as Dask tasks: their keys, what a call carries, what comes back, and their annotations.

The scheduler opens every task graph it is given, so a call carries user functions and values only as pickled
bytes, and token ids only as the delta that the worker does not hold yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from heddle_dask.core.ids import ActionId, EngineId, HostId, StepId, TrajectoryId
from heddle_dask.core.resources import CPUS, Resources
from heddle_dask.engines.contract import NOTHING_GENERATED, GenerateResult, ReplyReading, SamplingParams
from heddle_dask.live.wire.codec import WireValue
from heddle_dask.live.wire.gateway_messages import TextTarget

# Dask requires a tuple: kind of the task, session, trajectory or action, step index, attempt.
Key = tuple[str, str, str, int, int]

# Messages wait this long for others instead of Dask's 2 to 10 ms: a step is on the critical path.
STREAM_INTERVAL_S = 0.001
STEP_PREFIX = "llm"
ACTION_PREFIX = "tool"
ENGINE_PLUGIN = "heddle-rollout-worker"  # name of the worker plugin that hosts engines
SCHEDULER_EVENT = "heddle-scheduler"  # a `distributed.Event`: the scheduler has our plugin
ENGINE_RESOURCE = "ENGINE"  # on a worker that may host an engine
SLOT_RESOURCE = "LLM"  # published when its engine answers: one per slot, and for each step ahead
TOOL_RESOURCE = "TOOL"  # on a worker for actions: one per CPU
MODEL_RESOURCE = "MODEL"  # on a worker for model services: one per GPU, or per memory slot of a host without GPUs
TRAINER_RESOURCE = "TRAINER"  # on a worker that hosts the trainer of a run: 1
# More tags of a worker for model services: copies on one GPU at a time [1], bytes of a memory slot, and bytes of host
# memory for copies [no limit].
MODELS_PER_GPU_RESOURCE = "MODELS_PER_GPU"
SLOT_BYTES_RESOURCE = "MODEL_SLOT_BYTES"
COPY_BYTES_RESOURCE = "MODEL_COPY_BYTES"
# Environment variable of a worker: the directory for the logs of its engines, in place of the worker's scratch.
ENGINE_LOGS_VARIABLE = "HEDDLE_ENGINE_LOGS"
# Environment variable of a worker: a directory on the node's own disk for copies of model weights.
WEIGHTS_VARIABLE = "HEDDLE_WEIGHTS"
# Environment variable of a worker: the name under which its GPUs are counted, in place of its host's name.
NODE_VARIABLE = "HEDDLE_NODE"
# Environment variable of a worker: the class of its hardware, for affinity.
HARDWARE_VARIABLE = "HEDDLE_HARDWARE"
# Environment variable of a tool worker: bytes of memory that its actions may demand together.
MEMORY_VARIABLE = "HEDDLE_TOOL_MEMORY"
# Environment variable of a tool worker: its pool, in place of "cpu".
POOL_VARIABLE = "HEDDLE_TOOL_POOL"
# Environment variable of a worker for a trainer: CPU threads of each of its processes.
TRAINER_THREADS_VARIABLE = "HEDDLE_TRAINER_THREADS"


# -- keys ------------------------------------------------------------------------------------------


def step_key(session: str, step_id: StepId) -> Key:
    """Dask key of a step. The prefix is the kind and never an id: Dask keeps prefixes for ever."""
    return (STEP_PREFIX, session, *step_id)


def action_key(session: str, action_id: str) -> Key:
    return (ACTION_PREFIX, session, action_id, 0, 0)


def is_key_of(session: str, key: Any) -> bool:
    """Whether a Dask key is that of a step or an action of this session."""
    return isinstance(key, tuple) and len(key) == 5 and key[1] == session


def named_by(key: Key) -> StepId | ActionId:
    kind, _, name, step_index, attempt = key
    return ActionId(name) if kind == ACTION_PREFIX else StepId(TrajectoryId(name), step_index, attempt)


# -- steps -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepCall:
    """One LLM step on its way to a rollout worker."""

    session: str
    step_id: StepId
    # `base_tokens`, `base_crc`: length and CRC-32 of the context that the worker is expected to hold from the step
    # before.
    base_tokens: int
    base_crc: int
    # Little-endian int32 ids that follow it. With ``base_tokens == 0`` this is the whole context.
    delta: bytes
    sampling: SamplingParams
    reading: ReplyReading | None = None  # how its engine is to read the reply; None: not
    text_to: TextTarget | None = None  # where its text goes while it runs; None: nowhere

    @property
    def body_bytes(self) -> int:
        return len(self.delta)

    @property
    def key(self) -> Key:
        """The Dask key this call runs under."""
        return step_key(self.session, self.step_id)


StepStatus = Literal["ok", "aborted", "engine-lost", "context-missing", "refused"]


@dataclass(frozen=True, slots=True)
class StepResult(WireValue):
    """What came of a step."""

    # ``"ok"``; ``"aborted"``: stopped on request, the tokens so far are here; ``"engine-lost"``: no answer, ask again;
    # ``"context-missing"``: the worker lacks the base, ask again with the whole context; ``"refused"``: the engine
    # will never take it, `message` says why.
    status: StepStatus
    engine_id: str = ""
    generated: GenerateResult = NOTHING_GENERATED  # what the engine returned, packed
    run_s: float = 0.0  # seconds from the start of the task on its worker to the engine's answer
    # What the engine says it took, its own queue included; NaN when it does not say.
    engine_s: float = float("nan")
    message: str = ""
    read: str = ""  # JSON text of the message that the engine has read; empty: it was not asked


# -- actions ---------------------------------------------------------------------------------------


CallPlace = Literal["process", "coroutines", "loop"]
"""Where a function runs: in a process of its own, in that of coroutine functions, or on the worker's event loop."""


@dataclass(frozen=True, slots=True)
class ActionCall:
    """One action on its way to a tool worker."""

    session: str
    action_id: str
    # A cloudpickled (function, args, kwargs); None: it is long, and the driver sends it to the worker itself.
    payload: bytes | None
    timeout_s: float | None
    idempotency_key: str  # the same for every attempt of one call of the agent; `action_id` differs
    place: CallPlace = "process"
    function: str = ""  # its full name
    max_bytes: int = 2**63  # limit of the pickled value
    max_disk_bytes: int = 10 << 30  # limit of what it has in its scratch directory
    max_processes: int = 1024  # limit of its concurrent processes and threads

    @property
    def body_bytes(self) -> int:
        return 0 if self.payload is None else len(self.payload)

    @property
    def key(self) -> Key:
        """The Dask key this call runs under."""
        return action_key(self.session, self.action_id)


def too_large(what: str, size_bytes: int, limit_bytes: int) -> str:
    """One line about arguments or a value of an action that may not be sent."""
    return (
        f"its {what} of {size_bytes:,} bytes, pickled, is over the limit of {limit_bytes:,} (Budget.max_action_bytes): "
        "pass the path of a file, or raise the limit"
    )


# "sandbox-missing": ask again with the past of the sandbox; "sandbox-differs": it cannot be rebuilt.
ActionStatus = Literal[
    "ok",
    "raised",
    "timeout",
    "memory",
    "disk",
    "processes",
    "aborted",
    "lost",
    "rate-limited",
    "unavailable",
    "sandbox-missing",
    "sandbox-differs",
]


@dataclass(frozen=True, slots=True)
class ActionOutcome(WireValue):
    """What came of an action: `value` is cloudpickled when `status` is ``"ok"``."""

    status: ActionStatus
    value: bytes = b""
    message: str = ""
    detail: str = ""
    host_id: str = ""
    cpus: int = 0
    run_s: float = 0.0
    # `quota_s`, `load_s`: seconds of its wait for the quota of an API, and for its model service.
    quota_s: float = 0.0
    load_s: float = 0.0
    output: str = ""  # the end of what it had printed, where it is not ok


# -- annotations -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepPlacement(WireValue):
    """The scheduler's annotation of a step that was placed."""

    engine_id: EngineId
    priority: float  # larger runs first
    # Address of the worker that had the trajectory's context last; None when there is none.
    source: str | None = None
    prefill_only: bool = False  # stop after the first token (`core.commands.StartStep`)


@dataclass(frozen=True, slots=True)
class ActionPlacement(WireValue):
    """The scheduler's annotation of an action that was placed: its host, what it may use there, and its waits."""

    host_id: HostId
    resources: Resources
    quota_s: float = 0.0
    load_s: float = 0.0
    # `service`, `first_gpu`, `gpus`: the resident copy of the model service that it calls; the GPUs that it uses.
    service: str = ""
    first_gpu: int = 0
    gpus: int = 0
    reach_cpus: int = 0  # as that of `RunAction`, and so is `nice`
    nice: int = 0

    @property
    def cpus(self) -> int:
        return self.resources[CPUS]
