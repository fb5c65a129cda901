"""One rollout of ARL-Tangram's teacher workload in virtual time: requests of many services on a pool of GPUs.

Each trajectory generates for as long as its tokens take, then asks its teacher for the log-probabilities of its tokens,
and ends. Generation does not wait for engines: what is measured is the pool of GPUs, under arrivals as uneven as the
lengths of trajectories are. The controller, its strategy and the simulated hosts are those of any other simulation.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.ids import ActionId, GroupId, HostId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, DurationProfile, HostDescription, TrajectorySpec
from heddle_dask.core.resources import GPUS, MODELS_PER_GPU, Amounts, ModelService, ResourceDemand, Resources
from heddle_dask.sim.fleet import ServiceTimes
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.sim.program import SimulatedCall
from heddle_dask.sim.services import SimulatedServices
from heddle_dask.strategies.presets import build_strategies
from heddle_dask.workloads.planned import PlannedAction, PlannedTrajectory
from heddle_dask.workloads.synthetic import WORKLOADS, synthesize


@dataclass(frozen=True, slots=True)
class GpuWorkload:
    """Numbers of the workload and of the services; `GPU_SOURCES` has the origin of each.

    Attributes
    ----------
    services
        Number of services.
    skew
        The share of service number k is proportional to 1 / k**skew.
    token_s
        Seconds of a generated token.
    request_s
        Mean seconds of a request that runs alone on four GPUs; proportional to the tokens of its trajectory.
    serial_share
        Share of the seconds on one GPU that more GPUs do not shorten.
    weights_bytes
        Weights of a service.
    link_bytes_s, setup_s, evict_s, batch_cost
        As in `ServiceTimes`.
    """

    services: int = 9
    skew: float = 0.5
    token_s: float = 0.025
    request_s: float = 0.621
    serial_share: float = 0.1
    weights_bytes: int = 65_000_000_000
    link_bytes_s: float = 50e9
    setup_s: float = 0.05
    evict_s: float = 0.02
    batch_cost: float = 1.0


GPU_SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "services": "ARL-Tangram section 7.1: 9 teachers, with the judge 10 services",
        "skew": "assumption, swept from 0 to 1: how tasks are divided among teachers is not published",
        "token_s": "assumption, 20 to 30 ms a token as in the synthetic workloads (Heddle); swept from 12.5 to 50 ms",
        "lengths": "the synthetic workloads coding, search and math, one after the other by service",
        "request_s": "ARL-Tangram Table 1: a teacher action of batch 2,048 executes 0.621 s on average",
        "serial_share": "assumption; only the arm with elastic sizes depends on it",
        "weights_bytes": "assumption: 32 billion parameters in two bytes, the size of its trained model (section 7.1)",
        "link_bytes_s": "assumption: 50 of the 64 GB/s of PCIe 5.0 x16, which H100 has; swept from 25",
        "setup_s": "assumption: maps memory and restores the state of a process that was started before; swept to 0.5",
        "evict_s": "assumption: frees memory, writes nothing",
        "batch_cost": "1: log-probabilities of long texts use all of the compute, so that a batch of n takes n times "
        "as long; swept to 0.25",
        "serverless_s": "34 s to load OPT-30B with ordinary loaders, 3.6 to 8.2 times less with ServerlessLLM (its "
        "paper, arXiv 2401.14351, sections 1 and 7): 4.1 to 9.4 s",
    }
)


@dataclass(frozen=True, slots=True)
class GpuJob:
    """One arm at one batch size.

    Attributes
    ----------
    batch
        Trajectories.
    arm
        ``"pool"``: shared, evict on execution; ``"static"``: every service on its own GPUs all the time;
        ``"serverless"``: shared, started by a serverless loader.
    nodes
        GPUs of each node.
    sizes
        Numbers of GPUs on which a service can be.
    places
        Requests of a batch of one copy.
    replicas
        Copies of each service in a static deployment.
    models
        Copies that fit into the memory of a GPU at the same time.
    serverless_s
        Seconds to start a service with the serverless loader.
    """

    batch: int
    seed: int
    arm: str = "pool"
    workload: GpuWorkload = GpuWorkload()
    nodes: tuple[int, ...] = (8, 8, 8, 8, 8)
    sizes: tuple[int, ...] = (4,)
    places: int = 1
    replicas: tuple[int, ...] = ()
    models: int = 1
    actions: str = "fcfs-minimum"
    serverless_s: float = 6.0

    @property
    def gpus(self) -> int:
        """GPUs in use."""
        return sum(self.replicas) * self.sizes[0] if self.arm == "static" else sum(self.nodes)


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """What a rollout measured; seconds are means over its actions.

    Attributes
    ----------
    act_s, act_p99_s
        Completion time: from the request to the result.
    queue_s, overhead_s, run_s
        Its parts: waiting for GPUs, for the load of the service, and running.
    step_s
        Until the last trajectory had its result.
    loads
        Number of loads.
    """

    act_s: float
    act_p99_s: float
    queue_s: float
    overhead_s: float
    run_s: float
    step_s: float
    loads: int


def shares(workload: GpuWorkload) -> list[float]:
    """The share of each service in the trajectories."""
    weights = [1.0 / (number + 1) ** workload.skew for number in range(workload.services)]
    return [weight / sum(weights) for weight in weights]


def replicas_by_share(workload: GpuWorkload, copies: int) -> tuple[int, ...]:
    """So many copies divided among the services by their shares (largest remainder), at least one for each."""
    wanted = [share * copies for share in shares(workload)]
    given = [max(1, int(each)) for each in wanted]
    while sum(given) > copies and max(given) > 1:
        given[max(range(len(given)), key=lambda k: (given[k] > 1, given[k] - wanted[k]))] -= 1
    while sum(given) < copies:
        given[max(range(len(given)), key=lambda k: wanted[k] - given[k])] += 1
    return tuple(given)


@lru_cache(maxsize=64)
def drawn_trajectories(services: int, skew: float, batch: int, seed: int) -> tuple[tuple[int, PlannedTrajectory], ...]:
    """The number of the service and the plan of each trajectory."""
    workload = GpuWorkload(services=services, skew=skew)
    rng, kinds = random.Random(seed), ("coding", "search", "math")
    chosen = rng.choices(range(services), shares(workload), k=batch)
    drawn: list[tuple[int, PlannedTrajectory]] = []
    for number in range(services):
        wanted = chosen.count(number)
        plans = synthesize(WORKLOADS[kinds[number % 3]], prompts=-(-wanted // 8), samples=8, seed=seed * 100 + number)
        drawn += [(number, plan) for plan in plans[:wanted]]
    return tuple(drawn)


def run_gpu_job(job: GpuJob) -> GpuFigures:
    """Run the rollout."""
    return _GpuRollout(job).run()


class _GpuRollout:
    """The controller, its hosts, and programs that generate, ask and end."""

    def __init__(self, job: GpuJob) -> None:
        self.job = job
        self.time = VirtualTime()
        self.controller = Controller(build_strategies("least-load", overrides=[f"actions={job.actions}"]))
        self.services = {service.name: service for service in self._declared()}
        work = job.workload
        times = ServiceTimes(
            link_bytes_s=work.link_bytes_s,
            setup_s=work.setup_s,
            evict_s=work.evict_s,
            batch_cost=work.batch_cost,
            prepared=True,
        )
        self.bodies = SimulatedServices(self.services, times, self.time, lambda _: False, self._tell, self._ended)
        self.calls: dict[ActionId, SimulatedCall] = {}
        self.overhead_s = 0.0

    def _declared(self) -> list[ModelService]:
        job, work = self.job, self.job.workload
        load_s = tuple(
            job.serverless_s
            if job.arm == "serverless"
            else work.setup_s + work.weights_bytes / (work.link_bytes_s * size)
            for size in job.sizes
        )
        names = [f"teacher-{number}" for number in range(work.services)]
        return [
            ModelService(name, job.sizes, name if job.arm == "static" else "gpu", load_s, 0, job.places)
            for name in names
        ]

    def _hosts(self) -> list[HostDescription]:
        job = self.job
        if job.arm != "static":
            kinds = [("gpu", gpus) for gpus in job.nodes]
        else:
            names = zip(self.services, job.replicas, strict=True)
            kinds = [(name, job.sizes[0]) for name, copies in names for _ in range(copies)]
        return [
            HostDescription(HostId(f"host-{number}"), Resources.of({GPUS: gpus, MODELS_PER_GPU: job.models}), pool)
            for number, (pool, gpus) in enumerate(kinds)
        ]

    def run(self) -> GpuFigures:
        self._tell(ev.PoolsDeclared(0.0, (), tuple(self.services.values())))
        for host in self._hosts():
            self._tell(ev.HostJoined(0.0, host))
        work = self.job.workload
        drawn = drawn_trajectories(work.services, work.skew, self.job.batch, self.job.seed)
        mean_tokens = statistics.fmean(plan.context_tokens for _, plan in drawn)
        names = list(self.services)
        for number, plan in drawn:
            spec = TrajectorySpec(TrajectoryId(plan.trajectory_id + names[number]), GroupId(plan.group_id))
            self._tell(ev.TrajectorySubmitted(0.0, spec))
            alone_s = work.request_s * plan.context_tokens / mean_tokens
            generated_s = plan.generated_tokens * work.token_s + plan.tools_s
            self.time.at(generated_s, self._ask, spec.trajectory_id, names[number], alone_s)
        self.time.run()
        return self._figures()

    def _ask(self, trajectory_id: TrajectoryId, service: str, alone_s: float) -> None:
        work, sizes = self.job.workload, self.job.sizes
        on_four = work.serial_share + (1 - work.serial_share) / 4
        profile = DurationProfile(alone_s / on_four, work.serial_share)
        gpus = Amounts(sizes[0], sizes[-1], sizes if len(sizes) > 1 else ())
        demand = ResourceDemand.of(gpus=gpus)
        request = ActionRequest(
            ActionId(f"{trajectory_id}:logprobs"),
            trajectory_id,
            "reward",
            service,
            demand,
            self.services[service].pool,
            service,
            profile=profile,
        )
        planned = PlannedAction(service, profile, demand, "reward", request.pool, service)
        self.calls[request.action_id] = SimulatedCall(request, planned, self.time.now_s)
        self._tell(ev.ActionRequested(self.time.now_s, request))

    def _ended(self, event: ev.ActionFinished, call: SimulatedCall) -> None:
        call.back_s = self.time.now_s
        self._tell(event)
        self._tell(ev.TrajectoryEnded(self.time.now_s, call.trajectory_id, "completed"))

    def _tell(self, event: ev.Event) -> None:
        for command in self.controller.handle(event):
            match command:
                case cmd.RunAction():
                    action = self.controller.state.actions[command.action_id]
                    self.overhead_s += action.started_at - action.granted_at
                    self.bodies.run(command, self.calls[command.action_id])
                case cmd.LoadService() | cmd.EvictService() | cmd.DropServiceCopy():
                    self.bodies.carry_out(command)
                case cmd.WakeUp():
                    self.time.at(command.at_s, self._wake)
                case cmd.GiveUpAction():
                    raise AssertionError(f"{command.action_id}: {command.cause}")
                case _:
                    pass

    def _wake(self) -> None:
        self._tell(ev.TimeReached(self.time.now_s))

    def _figures(self) -> GpuFigures:
        calls = list(self.calls.values())
        stuck = [call for call in calls if call.back_s < 0]
        assert len(calls) == self.job.batch and not stuck, f"{len(stuck)} requests never ended: a bug"
        acts = sorted(call.back_s - call.asked_s for call in calls)
        run_s = statistics.fmean(call.run_s for call in calls)
        overhead_s = self.overhead_s / len(calls)
        return GpuFigures(
            act_s=statistics.fmean(acts),
            act_p99_s=acts[int(0.99 * (len(acts) - 1))],
            queue_s=statistics.fmean(acts) - run_s - overhead_s,
            overhead_s=overhead_s,
            run_s=run_s,
            step_s=max(call.back_s for call in calls),
            loads=self.bodies.loads,
        )


def varied(job: GpuJob, **numbers: float) -> GpuJob:
    """The job with other numbers of its workload."""
    return replace(job, workload=replace(job.workload, **numbers))  # type: ignore[arg-type]


def evenly(job: GpuJob, copies: int, sizes: Sequence[int]) -> GpuJob:
    """The static deployment with so many copies of one size, divided by the shares of the services."""
    return replace(job, arm="static", sizes=tuple(sizes), replicas=replicas_by_share(job.workload, copies))
