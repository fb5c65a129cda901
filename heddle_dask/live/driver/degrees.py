"""The driver's side of degrees: before a batch, decides which engines run, and has them run.

The decision is `strategies.parallelism`'s; what is here collects what it needs, and acts. Between batches only: no
step is under way when engines change.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, Literal

from distributed import Client

from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.capacity import Patience, missing_workers, wait_for_capacity
from heddle_dask.live.driver.degree_specs import POWERS, DegreeSpecs
from heddle_dask.live.driver.runner import Attempt
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.worker.rollout_worker import RolloutWorker
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.strategies.partition.work import Work
from heddle_dask.strategies.tp_degrees.choice import choose_degrees
from heddle_dask.strategies.tp_degrees.degrees import Running
from heddle_dask.strategies.tp_degrees.forecast import Coming, Guess, Past, works_of
from heddle_dask.strategies.tp_degrees.seats import (
    EngineWorker,
    Node,
    Seat,
    budget_of,
    nodes_of,
    seat_engines,
)

AskedDegrees = Literal["auto"] | Sequence[int] | None

_POLL_S = 0.1


def checked_degrees(asked: AskedDegrees) -> Literal["auto"] | tuple[int, ...] | None:
    """What was asked for, or a refusal.

    Raises
    ------
    BadInput
        Neither ``"auto"`` nor whole numbers of at least 1.
    """
    if asked is None or asked == "auto":
        return asked
    whole = not isinstance(asked, str) and all(type(degree) is int and degree >= 1 for degree in asked)
    if not whole or not asked:
        raise BadInput(
            f"degrees is {asked!r}: use 'auto' or a list of whole numbers of at least 1, such as [2, 1, 1]"
        )
    return tuple(degree for degree in asked if isinstance(degree, int))


def degrees_to_price(asked: AskedDegrees) -> tuple[int, ...]:
    """The degrees whose cost a session must know, in their order."""
    degrees = checked_degrees(asked)
    if degrees is None:
        return ()
    return tuple(sorted({*POWERS, *(degrees if degrees != "auto" else ())}))


class EngineDegrees:
    """Keeps the engines of one session at the degrees asked for.

    Parameters
    ----------
    engines
        How many workers that can host one must be there first; None: at least one, and all that are tagged.
    seed
        Of the search.
    told_apart
        Whether the strategies know which trajectory is a long one.
    note
        Told what is decided and waited for.

    Attributes
    ----------
    running
        Degrees of the engines that run, from the largest to the smallest.
    """

    def __init__(
        self,
        client: Client,
        specs: DegreeSpecs,
        *,
        engines: int | None,
        patience: Patience,
        max_context_tokens: int,
        seed: int,
        told_apart: bool,
        note: Callable[[str], None],
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
        self._past: list[Past] = []
        self._finished: list[Past] = []
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
            await dask.call_scheduler(self._client, "heddle_reseat", orders=[])
            await self._client.register_plugin(RolloutWorker(self._specs.spec, waits=True))
        elif not (await dask.call_scheduler(self._client, "heddle_seats"))["workers"]:
            raise BadInput(
                "the engines of this cluster were started with its workers and keep their degree: leave degrees out, "
                "or start the workers without --model"
            )

    def finished(self, record: TrajectoryRecord) -> None:
        """Remember what a trajectory took, for the decision before the next batch."""
        if record.status in ("completed", "truncated") and record.steps:
            self._finished.append(_past_of(record))

    async def provide(self, asked: AskedDegrees, attempts: Sequence[Attempt]) -> dict[str, Any]:
        """Have engines run at the degrees asked for, or at those that suit the batch; wait until they answer.

        Parameters
        ----------
        attempts
            The trajectories that come.

        Returns
        -------
        dict
            `degrees`, and how they were decided: for the run's journal.

        Raises
        ------
        BadInput
            They do not fit the workers, a cost is not known, or engines do not start.
        """
        wanted = checked_degrees(asked)
        if wanted is None:
            raise BadInput("degrees is None now: ask for others or for 'auto', engines are not given back")
        if self._finished:
            self._past, self._finished = self._finished, []
        self._specs.check(wanted)  # refused before anything is waited for or ended
        report = await self._workers()
        nodes = nodes_of(EngineWorker(n, node, units, tuple(g)) for n, node, units, g in report["workers"])
        now = [Seat(worker, degree, tuple(gpus)) for worker, degree, gpus in report["seats"]]
        decision: dict[str, Any]
        if wanted == "auto":
            decision = await self._decide(nodes, now, dict(report["start_s"]), attempts)
        else:
            decision = {"degrees": sorted(wanted, reverse=True), "source": "asked for"}
        await self._seat(seat_engines(nodes, decision["degrees"], now), now)
        self.running = tuple(decision["degrees"])
        return decision

    async def _workers(self) -> Mapping[str, Any]:
        """The seating's report, once every worker tagged for an engine has told what it is."""
        began_s = time.monotonic()
        while True:
            capacity = await dask.call_scheduler(self._client, "heddle_capacity")
            report: Mapping[str, Any] = await dask.call_scheduler(self._client, "heddle_seats")
            missing = missing_workers(capacity, self._engines)
            if not missing and len(report["workers"]) >= capacity["engine_workers"]:
                return report
            waited_s = time.monotonic() - began_s
            if waited_s > self._patience.workers_s:
                silent = "workers tagged for engines do not say which GPUs they have; see their logs"
                raise BadInput(f"{missing or silent}; waited {waited_s:.0f} s")
            await asyncio.sleep(_POLL_S)

    async def _decide(
        self,
        nodes: Sequence[Node],
        now: Sequence[Seat],
        start_s: Mapping[int, float],
        attempts: Sequence[Attempt],
    ) -> dict[str, Any]:
        engines = self._specs.engines()
        budget = budget_of(nodes, (d for d in engines if d <= max(len(node.gpus) for node in nodes)))
        works, source = await self._works(attempts)
        if not works:
            return self._without_knowledge(nodes, now)
        running = None
        if now:
            # One of a degree that was never started is expected to take as long as the slowest that was.
            longest_s = max(start_s.values(), default=0.0)
            restart_s = {degree: start_s.get(degree, longest_s) for degree in budget.degrees}
            running = Running(tuple(seat.degree for seat in now), restart_s)
        sites = {degree: engines[degree] for degree in budget.degrees}
        choice = await asyncio.to_thread(
            choose_degrees, works, budget, sites, running, seed=self._seed, told_apart=self._told_apart
        )
        uniform = min(choice.uniform, key=choice.uniform.__getitem__)
        self._note(
            f"degrees {_listed(choice.degrees)} for {len(works)} trajectories by {source}: about "
            f"{choice.seconds:.1f} s, {choice.price_s:.1f} of it to start engines; best uniform degree {uniform}: "
            f"{choice.uniform[uniform]:.1f} s"
        )
        return {
            "degrees": list(choice.degrees),
            "source": source,
            "seconds": choice.seconds,
            "price_s": choice.price_s,
            "uniform_degree": uniform,
            "uniform_s": choice.uniform[uniform] if choice.uniform[uniform] < math.inf else None,
        }

    async def _works(self, attempts: Sequence[Attempt]) -> tuple[list[Work], str]:
        guesses: list[Guess] = []
        specs = [attempt.spec for attempt in attempts]
        known = [attempt.task.known_tokens for attempt in attempts]
        if not self._past and min(known) <= 0:
            asked = [astuple(spec) for spec in specs]
            answer = await dask.call_scheduler(
                self._client, "heddle_forecast", session=self._session, trajectories=asked
            )
            guesses = [Guess(*pair) for pair in answer["guesses"]]
        coming = [Coming(s.group_id, s.prompt_tokens, tokens) for s, tokens in zip(specs, known, strict=True)]
        return works_of(coming, self._past, guesses, self._max_context_tokens)

    def _without_knowledge(self, nodes: Sequence[Node], now: Sequence[Seat]) -> dict[str, Any]:
        """What runs goes on; at first, the degree of the spec on all GPUs."""
        degree = self._specs.spec.tp_degree
        degrees = sorted((seat.degree for seat in now), reverse=True)
        if not degrees:
            degrees = [degree] * sum(min(len(node.gpus) // degree, len(node.workers)) for node in nodes)
        if not degrees:
            raise BadInput(f"no node has {degree} GPUs for an engine of degree {degree}: start more workers")
        self._note(
            f"nothing is known yet of the work to come: degrees {_listed(degrees)}; the next batch is decided by "
            "what this one takes"
        )
        return {"degrees": degrees, "source": "nothing"}

    async def _seat(self, seats: Sequence[Seat], now: Sequence[Seat]) -> None:
        orders = [
            [s.worker, s.degree, list(s.gpus), self._specs.at(s.degree, s.gpus).to_mapping()] for s in seats
        ]
        new = sum(seat not in now for seat in seats)
        if new:
            degrees = sorted((seat.degree for seat in seats), reverse=True)
            self._note(f"starting {new} of {len(seats)} engines, of degrees {_listed(degrees)}")
        await dask.call_scheduler(self._client, "heddle_reseat", orders=orders)
        await wait_for_capacity(self._client, len(seats), self._patience, self._note)


def _listed(degrees: Sequence[int]) -> str:
    return ",".join(map(str, degrees))


def _past_of(record: TrajectoryRecord) -> Past:
    first, last = record.steps[0], record.steps[-1]
    decode = sum(step.generated_tokens for step in record.steps)
    return Past(
        decode_tokens=decode,
        observed_tokens=max(0, last.token_stop - first.token_start - decode),
        tool_s=sum(action.run_s for action in record.actions if action.run_s == action.run_s),
    )
