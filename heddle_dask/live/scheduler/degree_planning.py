"""TP degrees before a batch: announces it to the controller, searches beside the event loop, deploys the engines."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from heddle_dask.core import events as ev
from heddle_dask.core.commands import DeployEngines, PlanDegrees
from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import DegreeRequest, NodeGpus, TrajectorySpec
from heddle_dask.cost.engine_cost import cost_from_mapping
from heddle_dask.live.scheduler.deployment import EngineDeployment
from heddle_dask.live.scheduler.session import Session
from heddle_dask.live.wire.driver_messages import EnginesProvided, ProvideEngines
from heddle_dask.predictors.contract import Predictor
from heddle_dask.predictors.features import Progress
from heddle_dask.strategies.partition.work import WorkEngine
from heddle_dask.strategies.tp_degrees.assignment import assign_engines, budget_of
from heddle_dask.strategies.tp_degrees.forecast import Quantiles, needs_prediction
from heddle_dask.strategies.tp_degrees.plan import plan_for_request

# Other sources are constants, or oracles that do not know this batch yet.
_LEARNT = ("xgboost", "group history", "prompt only")


class DegreePlanning:
    def __init__(
        self,
        session: Session,
        deployment: EngineDeployment,
        predictor: Predictor | None,
        # Hands an event, stamped with the time, to the controller; does nothing once the session has failed or closed.
        tell: Callable[[ev.DegreesRequested | ev.DegreesPlanned], None],
    ) -> None:
        self._session = session
        self._deployment = deployment
        self._predictor = predictor
        self._tell_controller = tell
        self._request = DegreeRequest(0, ())
        self._specs: Mapping[int, Mapping[str, Any]] = {}
        self._engines: Mapping[int, WorkEngine] = {}
        self._search: Mapping[str, Any] = {}
        self._answer: asyncio.Future[EnginesProvided] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def provide(self, request: ProvideEngines) -> EnginesProvided:
        """Have engines deployed for a batch; returns when the old ones have ended and the new ones are starting.

        Raises
        ------
        BadInput
            The engines find no room.
        """
        nodes, running = self._deployment.nodes, self._deployment.assignments
        if request.asked:
            assign_engines(nodes, request.asked, running)  # refused before the controller has the request
        self._engines = {
            each.tp_degree: WorkEngine(cost_from_mapping(each.cost, each.tp_degree), each.slots)
            for each in request.costs
        }
        self._specs = {each.tp_degree: each.spec for each in request.specs}
        self._search = {"seed": request.seed, "told_apart": request.lengths_known}
        capacities = tuple(node.capacity for node in nodes)
        self._request = DegreeRequest(
            request_id=self._request.request_id + 1,
            nodes=capacities,
            asked=request.asked,
            running=tuple(assignment.tp_degree for assignment in running),
            candidates=() if request.asked else self._candidates(capacities),
            default=request.default,
            start_s=tuple(self._deployment.start_s.items()),
            trajectories=tuple(each.spec for each in request.trajectories),
            known_tokens=tuple(each.known_tokens for each in request.trajectories),
            finished=request.finished,
            max_context_tokens=request.max_context_tokens,
        )
        self._answer = asyncio.get_running_loop().create_future()
        self._tell(ev.DegreesRequested(0.0, self._request))
        return await self._answer

    def _candidates(self, capacities: Sequence[NodeGpus]) -> tuple[int, ...]:
        """TP degrees with a known cost at which an engine fits a node."""
        largest = max((node.gpus for node in capacities), default=0)
        fitting = (tp_degree for tp_degree in self._engines if tp_degree <= largest)
        return tuple(budget_of(capacities, fitting).tp_degrees)

    def plan(self, command: PlanDegrees) -> None:
        self._begin(self._plan(command.request_id))

    def deploy(self, command: DeployEngines) -> None:
        self._begin(self._deploy(command))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _plan(self, request_id: int) -> None:
        request = self._request
        predicted: list[Quantiles] = []
        if needs_prediction(request):
            version = self._session.controller.state.policy_version
            predicted = await forecast(self._predictor, request.trajectories, version)
        try:
            plan = await asyncio.to_thread(plan_for_request, request, self._engines, predicted, **self._search)
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
            self._answer.set_result(EnginesProvided(plan, new))

    def _tell(self, event: ev.DegreesRequested | ev.DegreesPlanned) -> None:
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


async def forecast(
    predictor: Predictor | None, specs: Sequence[TrajectorySpec], policy_version: int = 0
) -> list[Quantiles]:
    """Median and 0.9 quantile of the tokens of each trajectory; empty without a predictor that has learnt.

    Parameters
    ----------
    policy_version
        The newest that an engine has reported.
    """
    if predictor is None or not specs:
        return []
    rows = [
        Progress(
            spec.trajectory_id,
            spec.group_id,
            domain=spec.domain,
            policy_version=policy_version,
            prompt_tokens=spec.prompt_tokens,
            message_tokens=spec.message_tokens,
            context_tokens=spec.prompt_tokens,
            max_steps=spec.max_steps,
        )
        for spec in specs
    ]
    answers = await asyncio.to_thread(predictor.predict, rows)
    if any(answer.source not in _LEARNT for answer in answers):
        return []
    return [Quantiles(answer.tokens, answer.tokens_q90) for answer in answers]
