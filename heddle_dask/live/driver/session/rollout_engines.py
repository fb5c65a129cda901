"""The engines of a rollout: what they cost, their start, and their TP degrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distributed import Client

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.defaults import SMALL_CONTEXT_TOKENS, model_context_tokens
from heddle_dask.engines.spec import EngineSpec, engine_kind
from heddle_dask.live.driver.connection.capacity import wait_for_capacity, weaker_isolation
from heddle_dask.live.driver.options import AskedDegrees, Engines
from heddle_dask.live.driver.programs.attempts import Attempt
from heddle_dask.live.driver.session.degrees import EngineDegrees, degrees_to_price
from heddle_dask.live.driver.session.open_session import OpenSession
from heddle_dask.live.driver.session.tp_degree_specs import TpDegreeSpecs
from heddle_dask.live.wire.driver_messages import GetCapacity
from heddle_dask.live.wire.transport import ask_scheduler
from heddle_dask.live.worker.engine_host import Watch
from heddle_dask.records.trajectory import TrajectoryRecord


class RolloutEngines:
    """Engines as they were asked for, in every session that the rollout opens.

    Raises
    ------
    BadInput
        A cost that no engine can have.
    """

    def __init__(
        self,
        client: Client,
        asked: Engines,  # what the user gave; with TP degrees, the engines are kept at those
        spec: EngineSpec,  # one engine
        *,
        model: str,  # model directory of the rollout
        max_context_tokens: int | None,  # of a trajectory; None: what the engine or the model allows
        seed: int,  # of the search for TP degrees
        told_apart: bool,  # whether the strategies know which trajectory is a long one
        note: Callable[[str], None],  # takes a line for each decision and each thing that is waited for
    ) -> None:
        self._client = client
        self._asked = asked
        self._spec = spec
        self._note = note
        specs = TpDegreeSpecs(spec, asked.cost)
        # What an engine is believed to cost, as a session is told; None: what its strategies believe.
        self.cost = specs.described(degrees_to_price(asked.tp_degrees))
        self._degrees: EngineDegrees | None = None
        if asked.tp_degrees is not None:
            self._degrees = EngineDegrees(
                client,
                specs,
                engines=asked.count,
                patience=asked.patience,
                max_context_tokens=max_context_tokens
                or engine_kind(spec.kind).completed(spec).max_model_len
                or model_context_tokens(model)
                or SMALL_CONTEXT_TOKENS,
                seed=seed,
                told_apart=told_apart,
                note=note,
            )

    @property
    def running_tp_degrees(self) -> tuple[int, ...]:
        """TP degrees of the engines that run, from the largest to the smallest; empty where none were asked for."""
        return () if self._degrees is None else self._degrees.running

    async def start(self, session: OpenSession) -> None:
        """Give the cluster what it lacks; without TP degrees, wait for the engines.

        Raises
        ------
        BadInput
            The cluster lacks workers, or an engine cannot start.
        ClusterLost, ControlPlaneFailed
            The session failed meanwhile.
        """
        patience = self._asked.patience
        watch = Watch.for_start(patience.engines_s)
        unless_failed = session.channel.unless_failed
        await unless_failed(session.provide_workers(self._spec, self._degrees, watch))
        if self._degrees is None:
            waits = wait_for_capacity(self._client, self._asked.count, patience, self._note, others_s=patience.others_s)
            await unless_failed(waits)
            await unless_failed(session.check_engines(self._spec))
        if line := weaker_isolation(await unless_failed(ask_scheduler(self._client, GetCapacity()))):
            self._note(line)

    async def provide(self, tp_degrees: AskedDegrees, attempts: Sequence[Attempt]) -> None:
        """Have engines at these TP degrees before the first step of a batch.

        Raises
        ------
        BadInput
            No TP degrees were asked for when the rollout opened, or these cannot be had.
        """
        if self._degrees is None:
            if tp_degrees is not None:
                raise BadInput("tp_degrees were not given when this rollout opened: give them to `Engines`")
        elif attempts:
            await self._degrees.provide(tp_degrees, attempts)

    def finished(self, record: TrajectoryRecord) -> None:
        if self._degrees is not None:
            self._degrees.finished(record)

    def description(self) -> dict[str, Any]:
        """What the metadata of a run say of its engines."""
        return {"logprobs": self._spec.options.logprobs, "engine": self._spec.to_mapping(), "cost": self.cost}
