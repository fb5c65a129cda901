"""The driver's side of TP degrees: what the user asks for, and engines that answer before a batch begins.

The controller decides (`core.engines`); `EngineDegrees` collects the facts of the batch, and waits. Engines change
between batches only: no step is under way then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from distributed import Client

from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import FinishedWork
from heddle_dask.live.driver.connection.capacity import WaitClock, jobs_waited_for, missing_workers, wait_for_capacity
from heddle_dask.live.driver.connection.control_channel import ControlPlaneFailed
from heddle_dask.live.driver.options import AskedDegrees, Patience, checked_degrees
from heddle_dask.live.driver.programs.attempts import Attempt
from heddle_dask.live.driver.session.tp_degree_specs import POWERS, TpDegreeSpecs
from heddle_dask.live.wire.driver_messages import (
    BatchTrajectory,
    ClearEngines,
    DeployedEngines,
    EngineCostAt,
    EngineSpecAt,
    EnginesProvided,
    GetCapacity,
    GetDeployedEngines,
    ProvideEngines,
)
from heddle_dask.live.wire.transport import ask_scheduler
from heddle_dask.live.worker.engine_host import Watch
from heddle_dask.live.worker.rollout_worker import RolloutWorker
from heddle_dask.records.trajectory import TrajectoryRecord

_POLL_S = 0.1


def degrees_to_price(asked: AskedDegrees) -> tuple[int, ...]:
    """The TP degrees whose cost a session must know, in their order."""
    degrees = checked_degrees(asked)
    if degrees is None:
        return ()
    return tuple(sorted({*POWERS, *(degrees if degrees != "auto" else ())}))


class EngineDegrees:
    def __init__(
        self,
        client: Client,
        specs: TpDegreeSpecs,
        *,
        # How many workers that can host one must be there first; None: at least one, and all that are tagged.
        engines: int | None,
        patience: Patience,
        max_context_tokens: int,
        seed: int,  # of the search
        told_apart: bool,  # whether the strategies know which trajectory is a long one
        note: Callable[[str], None],  # takes a line for each decision and each thing that is waited for
    ) -> None:
        self._client = client
        self._session = ""
        self._specs = specs
        self._engines = engines
        self._patience = patience
        self._max_context_tokens = max_context_tokens
        self._seed = seed
        self._told_apart = told_apart
        self._note = note
        self._earlier: list[FinishedWork] = []
        self._finished: list[FinishedWork] = []
        # TP degrees of the engines that run, from the largest to the smallest.
        self.running: tuple[int, ...] = ()

    async def open(self, session: str, register: bool) -> None:
        """Begin a session: have workers wait for orders.

        Parameters
        ----------
        register
            False where engines of our model run already: those of an earlier session of this kind wait for orders.

        Raises
        ------
        BadInput
            They were started with their workers, and take none.
        """
        self._session = session
        if register:
            await ask_scheduler(self._client, ClearEngines())
            watch = Watch.for_start(self._patience.engines_s)
            await self._client.register_plugin(RolloutWorker(self._specs.spec, watch, waits=True))
        elif not (await ask_scheduler(self._client, GetDeployedEngines())).workers:
            raise BadInput(
                "the engines of this cluster were started with its workers and keep their TP degree: leave tp_degrees "
                "out, or start the workers without --model"
            )

    def finished(self, record: TrajectoryRecord) -> None:
        """Remember what a trajectory took, for the decision before the next batch."""
        if record.status in ("completed", "truncated") and record.steps:
            self._finished.append(_work_of(record))

    async def provide(self, asked: AskedDegrees, attempts: Sequence[Attempt]) -> None:
        """Have engines run at the TP degrees asked for, or at those that suit the batch; wait until they answer.

        Parameters
        ----------
        attempts
            The trajectories of the batch.

        Raises
        ------
        BadInput
            They do not fit the workers, a cost is not known, or engines do not start.
        ControlPlaneFailed
            The scheduler plugin failed.
        """
        wanted = checked_degrees(asked)
        if wanted is None:
            raise BadInput("tp_degrees is None now: ask for others or for 'auto', engines are not given back")
        if self._finished:
            self._earlier, self._finished = self._finished, []
        self._specs.check(wanted)  # refused before anything is waited for or ended
        deployed = await self._deployed()
        provided = await self._provided(() if wanted == "auto" else wanted, deployed.tp_degrees, attempts)
        self._report(provided, len(attempts))
        self.running = provided.plan.tp_degrees
        await wait_for_capacity(self._client, len(self.running), self._patience, self._note)

    async def _deployed(self) -> DeployedEngines:
        """The engines that are deployed, once every worker tagged for an engine has announced itself."""
        clock = WaitClock()
        while True:
            capacity = await ask_scheduler(self._client, GetCapacity())
            deployed = await ask_scheduler(self._client, GetDeployedEngines())
            missing = missing_workers(capacity, self._engines)
            if not missing and len(deployed.workers) >= capacity.engine_workers:
                return deployed
            waited_s = clock.waited_s(bool(missing and jobs_waited_for(capacity, self._engines)))
            if waited_s > self._patience.workers_s:
                silent = "workers tagged for engines do not say which GPUs they have; see their logs"
                raise BadInput(f"{missing or silent}; waited {waited_s:.0f} s")
            await asyncio.sleep(_POLL_S)

    async def _provided(
        self, asked: tuple[int, ...], running: Sequence[int], attempts: Sequence[Attempt]
    ) -> EnginesProvided:
        engines = {} if asked else self._specs.engines()
        default = self._specs.spec.tp_degree
        request = ProvideEngines(
            session=self._session,
            asked=asked,
            specs=self._specs_at(asked or (*engines, *running, default)),
            costs=tuple(EngineCostAt(d, one.slots, one.cost.to_mapping()) for d, one in engines.items()),
            seed=self._seed,
            lengths_known=self._told_apart,
            default=default,
            max_context_tokens=self._max_context_tokens,
            trajectories=tuple(BatchTrajectory(each.spec, each.task.known_tokens) for each in attempts),
            finished=tuple(self._earlier),
        )
        try:
            return await ask_scheduler(self._client, request)
        except RuntimeError as error:
            raise ControlPlaneFailed(f"the TP degrees of the batch were not decided: {error}") from None

    def _specs_at(self, tp_degrees: Iterable[int]) -> tuple[EngineSpecAt, ...]:
        """The spec at each of these TP degrees; without those at which no engine can be started."""
        specs: list[EngineSpecAt] = []
        for tp_degree in dict.fromkeys(tp_degrees):
            with contextlib.suppress(BadInput):
                specs.append(EngineSpecAt(tp_degree, self._specs.at(tp_degree).to_mapping()))
        return tuple(specs)

    def _report(self, provided: EnginesProvided, trajectories: int) -> None:
        plan = provided.plan
        listed = ",".join(map(str, plan.tp_degrees))
        if plan.source == "nothing":
            self._note(
                f"nothing is known yet of the work to come: TP degrees {listed}; the next batch is decided by what "
                "this one takes"
            )
        elif plan.source != "asked":
            # The first of the shortest, as the search prefers it.
            possible = [(tp_degree, seconds) for tp_degree, seconds in plan.uniform_s if seconds is not None]
            uniform, uniform_s = min(possible, key=lambda pair: pair[1], default=(0, float("inf")))
            self._note(
                f"TP degrees {listed} for {trajectories} trajectories by {plan.source}: about "
                f"{plan.expected_makespan_s:.1f} s, {plan.restart_s:.1f} of it to start engines; best uniform "
                f"TP degree {uniform}: {uniform_s:.1f} s"
            )
        if provided.new:
            self._note(f"starting {provided.new} of {len(plan.tp_degrees)} engines, of TP degrees {listed}")


def _work_of(record: TrajectoryRecord) -> FinishedWork:
    decode = sum(step.generated_tokens for step in record.steps)
    ranges: dict[int, tuple[int, int]] = {}
    for step in record.steps:
        start, _ = ranges.get(step.branch, (step.token_start, 0))
        ranges[step.branch] = start, step.token_stop
    added = sum(stop - start for start, stop in ranges.values())
    return FinishedWork(
        decode_tokens=decode,
        observation_tokens=max(0, added - decode),
        tool_s=sum(action.run_s for action in record.actions if action.run_s == action.run_s),
    )
