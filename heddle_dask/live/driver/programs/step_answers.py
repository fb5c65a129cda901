"""Answers to the steps of one branch: from the journal while it has some, then from engines, and journalled."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

from heddle_dask.core.ids import StepId
from heddle_dask.core.nouns import StepRequest
from heddle_dask.live.driver.connection.submission import Interrupted
from heddle_dask.live.driver.programs.branch_port import BranchPort
from heddle_dask.live.driver.programs.held_context import HeldContext
from heddle_dask.live.driver.programs.open_step import OpenStep
from heddle_dask.live.driver.programs.program_errors import ReplayDiverged, StepLost
from heddle_dask.live.wire.messages import StepCall, StepResult
from heddle_dask.live.wire.result_codec import context_crc, step_body, step_from_body
from heddle_dask.records.token_record import TokenRecord


class StepAnswers:
    """The source of a branch's answers.

    Attributes
    ----------
    held
        What the worker holds of the context.
    """

    def __init__(self, port: BranchPort, seed: int) -> None:
        self._port = port
        self._seed = seed
        self.held = HeldContext()

    async def next(self, step: OpenStep, record: TokenRecord) -> StepResult:
        """The next journalled result of this step over `record`, or one from an engine.

        Raises
        ------
        StepLost
            In the recorded run the step was lost here.
        ReplayDiverged
            The journal holds another step.
        """
        if self._port.recorded.steps:
            return await self._replayed(step, record)
        asked_s = self._port.services.clock()
        result = await self._ask(step, record)
        if result.status in ("ok", "aborted"):
            # Waiting for an engine and for a slot, and the control plane; a wait inside the engine comes on top.
            outside_s = max(0.0, self._port.services.clock() - asked_s - result.run_s)
            made = result.generated
            inside_s = 0.0 if math.isnan(made.queue_s) else made.queue_s
            result = replace(result, generated=replace(made, queue_s=outside_s + inside_s))
            self._port.journal("step", step_body(step.index, record.token_ids, result))
        return result

    async def _replayed(self, step: OpenStep, record: TokenRecord) -> StepResult:
        if self._port.recorded.next_is_cancelled(step.index):
            # It will be cancelled, as in the recorded run.
            await asyncio.Event().wait()
        body = self._port.recorded.steps.popleft()
        self.held.not_sent()  # the first real step brings everything
        if "lost" in body and body["step_index"] == step.index:
            raise StepLost(body["lost"])
        asked = (step.index, len(record), context_crc(record.token_ids))
        if (body["step_index"], body.get("context_tokens"), body.get("context_crc")) != asked:
            held = f"over {body['context_tokens']}" if "context_tokens" in body else "that was given up"
            held += " other ones" if body.get("context_tokens") == len(record) else ""
            raise ReplayDiverged(
                f"step {step.index} over {len(record)} tokens; the journal holds step "
                f"{body['step_index']} {held}"
            )
        return step_from_body(body)

    async def _ask(self, step: OpenStep, record: TokenRecord) -> StepResult:
        request = StepRequest(
            StepId(self._port.spec.trajectory_id, step.index, step.attempt),
            len(record),
            step.tokens_left,
        )
        self._port.announce()
        delta = self.held.delta(record, step.send_all)
        call = StepCall(
            session=self._port.services.session,
            step_id=request.step_id,
            base_tokens=delta.base_tokens,
            base_crc=delta.base_crc,
            delta=delta.token_ids,
            sampling=replace(step.sampling, max_tokens=step.tokens_left, seed=self._seed_of(step)),
        )
        try:
            return await self._port.services.submitter.step(call, request)
        except Interrupted as interrupt:
            if interrupt.kind == "given-up":
                return StepResult(status="refused", message=interrupt.cause)
            return StepResult(status="engine-lost", message=interrupt.cause)

    def _seed_of(self, step: OpenStep) -> int | None:
        """The seed of the next request, if it has one: the program's, or the trajectory's; parts draw differently."""
        if step.sampling.seed is not None:
            return (step.sampling.seed + step.parts) % 2**63
        if not self._port.services.sampling.seeded:
            return None
        return (self._seed * 1_000_003 + step.index * 1_009 + step.parts) % 2**31

    def lost(self, step: OpenStep, message: str) -> StepLost:
        """The failure, journalled: the program may go on after it, and does the same when it is resumed."""
        if not self._port.branch.tree.interrupted:
            self._port.journal("step-lost", {"step_index": step.index, "lost": message})
        return StepLost(message)

    def give_up(self, step: OpenStep) -> None:
        """The program has cancelled the step; unless the run is ending, it does so again when it is resumed."""
        tree = self._port.branch.tree
        if self._port.recorded.next_is_cancelled(step.index):
            self._port.recorded.steps.popleft()
        elif not (tree.interrupted or tree.ended):
            self._port.journal("step-cancelled", {"step_index": step.index})
