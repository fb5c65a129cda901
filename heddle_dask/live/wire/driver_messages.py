"""Messages between the driver and the scheduler plugin.

The driver asks (requests) and reports; the scheduler answers. Notices for the driver wait in the scheduler until the
driver's long poll (`FetchUpdates`) brings them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from heddle_dask.core.commands import AdmitTrajectory, CancelTrajectory, GiveUpAction, GiveUpStep
from heddle_dask.core.events import EngineLost, TrajectoryEnded, WeightsFetched, WeightsInstalled
from heddle_dask.core.ids import ActionId, StepId
from heddle_dask.core.nouns import (
    ActionRequest,
    EngineDescription,
    FinishedWork,
    StepRequest,
    TpDegreePlan,
    TrajectorySpec,
)
from heddle_dask.core.resources import ApiQuota, ModelService
from heddle_dask.core.run_description import RetryPolicy, StalenessBound, WeightUpdatePolicy
from heddle_dask.live.wire.cluster_messages import QueuedCapacity
from heddle_dask.live.wire.codec import Message, Request, WireValue
from heddle_dask.live.wire.messages import Key
from heddle_dask.live.wire.transport import Done

# -- notices: what the scheduler tells the driver --------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepResultLostNotice(Message):
    """The step has ended, and its worker died with the result: without that the driver asks again."""

    step_id: StepId


@dataclass(frozen=True, slots=True)
class ActionResultLostNotice(Message):
    """The action has ended, and its worker died with the result: without that the driver asks again."""

    action_id: ActionId


@dataclass(frozen=True, slots=True)
class ApiNotice(Message):
    """The circuit breaker of an API has opened, for so many seconds and for a cause, or has closed."""

    api: str
    state: str
    seconds: float = 0.0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ProgressNotice(Message):
    """A line for the user."""

    line: str


@dataclass(frozen=True, slots=True)
class ActionPayloadWantedNotice(Message):
    """An action has started on the worker at `address`, and waits for its payload."""

    action_id: ActionId
    address: str


Notice = (
    AdmitTrajectory
    | GiveUpStep
    | GiveUpAction
    | CancelTrajectory
    | EngineLost
    | WeightsFetched
    | WeightsInstalled
    | StepResultLostNotice
    | ActionResultLostNotice
    | ActionPayloadWantedNotice
    | ApiNotice
    | ProgressNotice
)
"""Commands and events cross as themselves, in the names of the session.

An `EngineLost` is that of an engine that died under a living worker; a `WeightsFetched`, of one that has failed for
good.
"""


# -- the session -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeclaredService(WireValue):
    """A model service of a run."""

    facts: ModelService  # what the controller is told
    spec: Mapping[str, Any]  # what its hosts are told (`ServiceSpec.to_mapping`)


@dataclass(frozen=True, slots=True)
class StartSession(Request[Done]):
    """Start a session; the sessions that are open share the engines and pools of the cluster."""

    session: str
    client_id: str
    # `strategy`, `overrides`, `seed`, `cost`: as `strategies.presets.strategies_of_run` takes them.
    strategy: str
    overrides: tuple[str, ...]
    seed: int
    cost: Mapping[str, Any] | None = None
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    quotas: tuple[ApiQuota, ...] = ()  # of the APIs that the run declares
    services: tuple[DeclaredService, ...] = ()  # model services that the run declares
    weight: float = 1.0  # its share of them, relative to that of the other sessions
    # The bound on the age of its trajectories; None: nothing is trained on them.
    staleness: StalenessBound | None = None
    # How engines go over to the weights that it trains.
    weights: WeightUpdatePolicy = field(default_factory=WeightUpdatePolicy)
    silence_s: float = 60.0  # a worker that is silent for so long is lost
    name: str = ""  # for people: of its output, else of its environment
    environment: str = ""


@dataclass(frozen=True, slots=True)
class Updates(Message):
    """What is new for the driver."""

    notices: tuple[Notice, ...] = ()
    # Lines of the controller's journal (`core.journal_codec`).
    journal: list[Any] = field(default_factory=list)
    # Of trajectories by state, engines and moves; empty when the session is not open.
    counts: Mapping[str, Any] = field(default_factory=dict)
    # Traceback of the first exception of the scheduler plugin, after which it issues no command.
    failure: str | None = None
    # One line that says what has ended the session before the driver did; empty: nothing has.
    stopped: str = ""
    # With the last updates: whether the engines end, which the driver owns and no other session uses.
    ends_engines: bool = False
    # Number of the session's journal lines in the answers before this one; answers may overtake each other.
    lines_before: int = 0


@dataclass(frozen=True, slots=True)
class FetchUpdates(Request[Updates]):
    """Long poll: answered as soon as there is a notice or a failure, and after `wait_s` seconds at the latest."""

    session: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class EndSession(Request[Updates]):
    """End the session once its last reports have arrived; answered with its last updates."""

    session: str


# -- trajectories ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubmittedTrajectory(WireValue):
    """A trajectory that waits for admission."""

    spec: TrajectorySpec
    # `known_tokens`, `known_tools_s`, `known_observed_tokens`: for oracles: generated tokens, seconds of tools and
    # tokens that tools add, as far as they are left to this session; 0 when unknown.
    known_tokens: float = 0
    known_tools_s: float = 0
    known_observed_tokens: float = 0


@dataclass(frozen=True, slots=True)
class SubmitTrajectories(Request[Done]):
    """Announce trajectories; a notice admits each."""

    session: str
    trajectories: tuple[SubmittedTrajectory, ...]


@dataclass(frozen=True, slots=True)
class SubmittedTask(WireValue):
    """A step or an action that becomes a Dask task, of which the driver has made the future."""

    key: Key
    request: StepRequest | ActionRequest  # what the controller is asked for
    run: bytes  # `_dask_internals.packed_run`: what its worker opens and runs


@dataclass(frozen=True, slots=True)
class SubmitTasks(Message):
    """Run these steps and actions where and when the controller says."""

    session: str
    tasks: tuple[SubmittedTask, ...]


@dataclass(frozen=True, slots=True)
class EndedTrajectory(WireValue):
    """The program of a trajectory has ended; `reward` is None when unknown, `message` one line about the cause."""

    event: TrajectoryEnded
    cause: str = ""
    reward: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class TrajectoriesEndedReport(Message):
    """The programs of these trajectories have ended."""

    session: str
    ended: tuple[EndedTrajectory, ...]


# -- engines ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadyEngine(WireValue):
    """An engine that answers; `kind` and `model` (its directory) as in its `EngineSpec`, `logprobs` as it returns."""

    engine: EngineDescription
    kind: str
    model: str
    logprobs: str = "raw"


@dataclass(frozen=True, slots=True)
class Capacity(Message):
    """Engines, tool CPUs and workers of the cluster."""

    engines: tuple[ReadyEngine, ...]
    tool_cpus: int
    # The latest failed start of an engine, one line for each worker address.
    start_failures: Mapping[str, str]
    plugins: tuple[str, ...]  # names of the worker plugins that are registered
    # `workers`, `engine_workers`, `tool_workers`: workers in all; workers tagged for engines and for tools.
    workers: int
    engine_workers: int
    tool_workers: int
    # Whether this session has taken the engines over from a driver that has died.
    engines_inherited: bool = False
    # What jobs that wait in a queue will bring; nothing where no cluster object of this project submits jobs.
    queued: QueuedCapacity = field(default_factory=QueuedCapacity)
    # For each tool worker: its host, by what means it keeps actions apart, and why that is less than they ask for.
    isolation: tuple[tuple[str, str, str], ...] = ()
    sessions: tuple[str, ...] = ()  # ids of the open sessions
    starting: tuple[str, ...] = ()  # what each engine that starts is doing


@dataclass(frozen=True, slots=True)
class GetCapacity(Request[Capacity]):
    """What is the cluster's capacity?"""


@dataclass(frozen=True, slots=True)
class OwnEngines(Request[Done]):
    """The driver of this session owns the engines; `kept_s` seconds after its death they end."""

    session: str
    kept_s: float


@dataclass(frozen=True, slots=True)
class AwaitEnginesEnd(Request[Done]):
    """Answered when the engines that end with the last session have ended."""


@dataclass(frozen=True, slots=True)
class DeployedEngines(Message):
    """Names of the workers that wait for orders, and the TP degree of each engine that is deployed."""

    workers: tuple[str, ...]
    tp_degrees: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GetDeployedEngines(Request[DeployedEngines]):
    """Which engines are deployed?"""


@dataclass(frozen=True, slots=True)
class ClearEngines(Request[Done]):
    """End all deployed engines and forget the workers; each announces itself to a new plugin."""


@dataclass(frozen=True, slots=True)
class BatchTrajectory(WireValue):
    """A trajectory of the batch; `known_tokens` it will generate, 0 when unknown."""

    spec: TrajectorySpec
    known_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineSpecAt(WireValue):
    """The engine spec at a TP degree, as a mapping (`EngineSpec.to_mapping`)."""

    tp_degree: int
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineCostAt(WireValue):
    """Slots and cost of an engine at a TP degree; `cost` as `cost_from_mapping` takes it."""

    tp_degree: int
    slots: int
    cost: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EnginesProvided(Message):
    """The plan that is deployed, and how many of its engines are started for it."""

    plan: TpDegreePlan
    new: int


@dataclass(frozen=True, slots=True)
class ProvideEngines(Request[EnginesProvided]):
    """Have the controller decide on the TP degrees for a batch, and deploy its engines.

    Answered when the old engines have ended and the new ones are starting. Refused when they find no room.
    """

    session: str
    asked: tuple[int, ...]  # TP degrees that the user asked for; empty: they are planned
    specs: tuple[EngineSpecAt, ...]  # at every TP degree at which an engine can be started
    costs: tuple[EngineCostAt, ...]  # of the candidates of a plan; empty where `asked` is given
    # `seed`, `lengths_known`: of the search: its seed, and whether the strategies know which trajectory is a long one.
    seed: int
    lengths_known: bool
    default: int  # TP degree of the engines where nothing runs and nothing is known of the work
    max_context_tokens: int
    trajectories: tuple[BatchTrajectory, ...]
    finished: tuple[FinishedWork, ...] = ()  # what earlier trajectories took
