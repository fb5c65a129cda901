"""TP degrees before a batch: announces it to the controller, searches beside the event loop, deploys the engines."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from heddle_dask.core import events as ev
from heddle_dask.core.commands import DeployEngines, PlanDegrees
from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.core.tp_degrees import DegreeRequest, FinishedWork
from heddle_dask.cost.engine_cost import cost_from_mapping
from heddle_dask.live.scheduler.deployment import EngineDeployment
from heddle_dask.live.scheduler.forecast import forecast
from heddle_dask.live.scheduler.session import Session
from heddle_dask.predictors.contract import Predictor
from heddle_dask.strategies.partition.work_plan import WorkEngine
from heddle_dask.strategies.tp_degrees.assignment import assign_engines, budget_of
from heddle_dask.strategies.tp_degrees.forecast import Quantiles, needs_prediction
from heddle_dask.strategies.tp_degrees.plan import plan_for_request


class DegreePlanning:
    """Carries out the commands `PlanDegrees` and `DeployEngines` of one session.

    Parameters
    ----------
    tell
        Hands an event to the controller, which stamps it; does nothing once the session has failed or closed.
    """

    def __init__(
        self,
        session: Session,
        deployment: EngineDeployment,
        predictor: Predictor | None,
        tell: Callable[[ev.Event], None],
    ) -> None:
        self._session = session
        self._deployment = deployment
        self._predictor = predictor
        self._tell_controller = tell
        self._request = DegreeRequest(0, ())
        self._specs: Mapping[int, Mapping[str, Any]] = {}
        self._engines: Mapping[int, WorkEngine] = {}
        self._search: Mapping[str, Any] = {}
        self._answer: asyncio.Future[Mapping[str, Any]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def provide(
        self,
        *,
        asked: Sequence[int],
        specs: Sequence[Sequence[Any]],
        engines: Sequence[Sequence[Any]],
        search: Mapping[str, Any],
        trajectories: Sequence[Sequence[Any]],
        finished: Sequence[Sequence[Any]],
        **facts: Any,
    ) -> Mapping[str, Any]:
        """Have engines deployed for a batch; returns when the old ones have ended and the new ones are starting.

        Parameters
        ----------
        asked
            TP degrees that the user asked for; empty: they are planned.
        specs
            Pairs of a TP degree and the engine spec at it, as a mapping.
        engines
            TP degree, slots and cost of an engine at each candidate; empty where `asked` is given.
        search
            `seed` and `told_apart` of the search.
        trajectories, finished
            Fields of `TrajectorySpec` and of `FinishedWork`.
        facts
            Further fields of `DegreeRequest`.

        Returns
        -------
        Mapping
            Fields of the `TpDegreePlan`, and how many engines are `new`.

        Raises
        ------
        BadInput
            The engines find no room.
        """
        nodes, running = self._deployment.nodes, self._deployment.assignments
        if asked:
            assign_engines(nodes, asked, running)  # refused before the controller hears of it
        self._engines = {d: WorkEngine(cost_from_mapping(cost, d), slots) for d, slots, cost in engines}
        self._specs = {tp_degree: spec for tp_degree, spec in specs}
        self._search = search
        capacities = tuple(node.capacity for node in nodes)
        largest = max((node.gpus for node in capacities), default=0)
        candidates = (
            [] if asked else budget_of(capacities, (d for d in self._engines if d <= largest)).tp_degrees
        )
        self._request = DegreeRequest(
            request_id=self._request.request_id + 1,
            nodes=capacities,
            asked=tuple(asked),
            running=tuple(assignment.tp_degree for assignment in running),
            candidates=tuple(candidates),
            start_s=tuple(self._deployment.start_s.items()),
            trajectories=tuple(TrajectorySpec(*fields) for fields in trajectories),
            finished=tuple(FinishedWork(*fields) for fields in finished),
            known_tokens=tuple(facts.pop("known_tokens")),
            **facts,
        )
        self._answer = asyncio.get_running_loop().create_future()
        self._tell(ev.DegreesRequested(0.0, self._request))
        return await self._answer

    def plan(self, command: PlanDegrees) -> None:
        """Begin to search."""
        self._begin(self._plan(command.request_id))

    def deploy(self, command: DeployEngines) -> None:
        """Begin to deploy."""
        self._begin(self._deploy(command))

    def close(self) -> None:
        """Stop what runs."""
        for task in self._tasks:
            task.cancel()

    async def _plan(self, request_id: int) -> None:
        request = self._request
        predicted: list[Quantiles] = []
        if needs_prediction(request):
            version = self._session.controller.state.policy_version
            pairs = await forecast(self._predictor, request.trajectories, version)
            predicted = [Quantiles(*pair) for pair in pairs]
        try:
            plan = await asyncio.to_thread(
                plan_for_request, request, self._engines, predicted, **self._search
            )
        except BadInput as error:
            self._tell(ev.DegreesPlanned(0.0, request_id, None, str(error)))
            raise
        self._tell(ev.DegreesPlanned(0.0, request_id, plan))

    async def _deploy(self, command: DeployEngines) -> None:
        running = self._deployment.assignments
        assignments = assign_engines(self._deployment.nodes, command.tp_degrees, running)
        lacking = [d for d in command.tp_degrees if d not in self._specs]
        if lacking:
            raise BadInput(f"an engine of TP degree {lacking[0]} cannot be started: ask for other TP degrees")
        await self._deployment.deploy(
            (each, {**self._specs[each.tp_degree], "devices": list(each.gpus)}) for each in assignments
        )
        plan = self._session.controller.state.tp_degree_plan
        if self._answer is not None and not self._answer.done() and plan is not None:
            new = sum(each not in running for each in assignments)
            self._answer.set_result({**asdict(plan), "new": new})

    def _tell(self, event: ev.Event) -> None:
        self._tell_controller(event)
        if self._session.failure is not None:
            self._fail(RuntimeError(self._session.failure))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(self._run(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BadInput as error:
            self._fail(error)
        except Exception as error:
            self._session.latch(traceback.format_exc())
            self._fail(RuntimeError(f"{type(error).__name__}: {error}"))
        except asyncio.CancelledError:
            self._fail(RuntimeError("the session was closed while its engines were deployed"))
            raise

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
