"""One batch of trajectories that call an API in virtual time: through the controller, or directly with retries."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field, replace

from benchmarks.actions.simulated_api import ApiTraits, SimulatedApi
from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.ids import ActionId, GroupId, HostId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, HostDescription, TrajectorySpec
from heddle_dask.core.quotas import REPEATED
from heddle_dask.core.resources import ApiQuota, ResourceDemand, Resources, api_resource
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.strategies.presets import build_strategies

SEARCH = "search"
HOST = HostId("host")


@dataclass(frozen=True, slots=True)
class ApiJob:
    """A batch.

    Attributes
    ----------
    arm
        ``"pool"``: calls wait for grants; ``"direct"``: calls go out at once.
    calls_each
        Calls of each trajectory, one after the other, with `think_s` seconds (mean, exponential) of LLM steps before
        each of them.
    retries, retry_s, timeout_s
        Of direct calls: repetitions after an error, a rejection or a time-out; seconds before the first repetition,
        doubled each time (0: at once); and seconds until a client stops waiting.
    """

    batch: int
    seed: int
    arm: str = "pool"
    traits: ApiTraits = field(default_factory=ApiTraits)
    calls_each: int = 8
    think_s: float = 10.0
    retries: int = 3
    retry_s: float = 0.0
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ApiFigures:
    """What came of a batch: completion times of actions, seconds of the batch, and shares of calls and actions."""

    act_mean_s: float
    act_p99_s: float
    step_s: float
    rejected: int
    calls: int
    failed_share: float


def run_api_job(job: ApiJob) -> ApiFigures:
    """Play one batch to its end."""
    run = _PoolRun(job) if job.arm == "pool" else _DirectRun(job)
    return run.play()


class _Run:
    """Trajectories that think and call; subclasses make the calls."""

    def __init__(self, job: ApiJob) -> None:
        self.job = job
        self.time = VirtualTime()
        self.random = random.Random(job.seed)
        self.api = SimulatedApi(job.traits, self.time, job.seed + 1)
        self.acts_s: list[float] = []
        self.failed = 0
        self.last_s = 0.0
        self.left: dict[int, int] = {}

    def play(self) -> ApiFigures:
        for number in range(self.job.batch):
            self.left[number] = self.job.calls_each
            self.begin(number)
            self._think(number)
        self.time.run()
        ordered = sorted(self.acts_s)
        return ApiFigures(
            statistics.fmean(ordered),
            ordered[int(0.99 * (len(ordered) - 1))],
            self.last_s,
            self.api.rejected,
            self.api.calls,
            self.failed / len(ordered),
        )

    def begin(self, number: int) -> None:
        """A trajectory starts."""

    def act(self, number: int, asked_s: float) -> None:
        """A trajectory calls the API; `ended` follows."""
        raise NotImplementedError

    def _think(self, number: int) -> None:
        if self.left[number] == 0:
            return
        self.left[number] -= 1
        seconds = self.random.expovariate(1.0 / self.job.think_s)
        self.time.after(seconds, lambda: self.act(number, self.time.now_s))

    def ended(self, number: int, asked_s: float, ok: bool) -> None:
        """An action has ended."""
        self.acts_s.append(self.time.now_s - asked_s)
        self.failed += not ok
        self.last_s = self.time.now_s
        self._think(number)


class _DirectRun(_Run):
    """Calls go out at once, and are repeated by their client."""

    def act(self, number: int, asked_s: float, tried: int = 0) -> None:
        waits = [True]

        def over(cause: str) -> None:
            if not waits:
                return  # the client has stopped waiting
            waits.clear()
            if not cause:
                self.ended(number, asked_s, True)
            elif tried == self.job.retries:
                self.ended(number, asked_s, False)
            else:
                delay_s = self.job.retry_s * 2**tried * self.random.uniform(0.5, 1.0)
                self.time.after(delay_s, self.act, number, asked_s, tried + 1)

        self.time.after(self.job.timeout_s, over, "timeout")
        self.api.call(over)


class _PoolRun(_Run):
    """Calls are actions of the controller, which knows the quota."""

    def __init__(self, job: ApiJob) -> None:
        super().__init__(job)
        retries = RetryPolicy(max_call_attempts=100, max_call_s=3600)
        strategies = build_strategies("sticky-least-loaded", overrides=["actions=elastic,order=fcfs"])
        self.controller = Controller(strategies, retries)
        traits = job.traits
        # The simulated network has no delay: a call reaches its API when it is granted.
        quota = ApiQuota(SEARCH, traits.concurrency, traits.windows, begins_within_s=0.0)
        self.tell(ev.PoolsDeclared(0.0, (quota,)))
        self.tell(ev.HostJoined(0.0, HostDescription(HOST, Resources.of(cpus=1))))
        self.requests: dict[ActionId, tuple[int, float, ActionRequest]] = {}
        self.actions = 0

    def tell(self, event: ev.Event) -> None:
        for command in self.controller.handle(replace(event, at=self.time.now_s)):
            match command:
                case cmd.WakeUp():
                    self.time.at(command.at_s, self.tell, ev.TimeReached(0.0))
                case cmd.RunAction():
                    self._run(command.action_id)
                case cmd.GiveUpAction():
                    number, asked_s, _ = self.requests.pop(command.action_id)
                    self.ended(number, asked_s, False)

    def begin(self, number: int) -> None:
        name = str(number)
        self.tell(ev.TrajectorySubmitted(0.0, TrajectorySpec(TrajectoryId(name), GroupId(name))))

    def act(self, number: int, asked_s: float, attempt: int = 0) -> None:
        self.actions += 1
        demand = ResourceDemand.of({api_resource(SEARCH): 1})
        name = ActionId(f"{number}/{self.actions}")
        request = ActionRequest(name, TrajectoryId(str(number)), "tool", "search", demand, attempt=attempt)
        self.requests[name] = (number, asked_s, request)
        self.tell(ev.ActionRequested(0.0, request))

    def _run(self, action_id: ActionId) -> None:
        began_s = self.time.now_s
        # After this event: the controller is not called from inside itself.
        self.time.after(0.0, self.api.call, lambda cause: self._answered(action_id, began_s, cause))

    def _answered(self, action_id: ActionId, began_s: float, cause: str) -> None:
        number, asked_s, request = self.requests.pop(action_id)
        run_s = self.time.now_s - began_s
        self.tell(ev.ActionFinished(0.0, action_id, HOST, run_s, not cause, True, cause))
        if cause in REPEATED:
            self.act(number, asked_s, request.attempt + 1)
        else:
            self.ended(number, asked_s, not cause)
