"""The context that an agent program is given: through it the program reaches the model and tools.

It owns the token record. Sampled tokens are kept as they were sampled; a message is rendered once. Results of steps
and actions are journalled when they arrive, so that a program can be run again up to where it was.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np

from heddle_dask.core.ids import ActionId, StepId
from heddle_dask.core.nouns import ActionRequest, StepRequest, TrajectorySpec
from heddle_dask.engines.contract import VersionSpan
from heddle_dask.environments.base import ActionFailed, ActionKind, Reply, Role
from heddle_dask.live.driver.held_context import HeldContext
from heddle_dask.live.driver.open_step import OpenStep
from heddle_dask.live.driver.pending_input import PendingInput
from heddle_dask.live.driver.services import Recorded, Services
from heddle_dask.live.driver.submission import Interrupted
from heddle_dask.live.wire.messages import ActionCall, ActionOutcome, StepCall, StepResult, too_large
from heddle_dask.live.wire.result_codec import action_body, action_from_body, step_body, step_from_body
from heddle_dask.records.token_record import TokenRecord
from heddle_dask.records.trajectory import ActionRecord, StepRecord


class BudgetExhausted(Exception):
    """The program asked for a step although its step, token or context budget is used up."""


class StepLost(Exception):
    """A step has no result: the engine refuses it, or it was lost too often. The message says why."""


class ReplayDiverged(Exception):
    """On resuming, the program asked for something else than the journal holds."""


class LiveContext:
    """One trajectory's context; implements `heddle_dask.environments.base.Context`."""

    def __init__(
        self,
        services: Services,
        spec: TrajectorySpec,
        seed: int,
        recorded: Recorded | None = None,
    ) -> None:
        self._services = services
        self._spec = spec
        self._seed = seed
        self._recorded = recorded or Recorded()
        self._input = PendingInput(services.template)
        self._held = HeldContext()
        self._told_done = False
        self._step_open = False
        # Attempts at the next step that the program has cancelled.
        self._cancelled = 0
        self._replayed_cancel = False
        self.interrupted = False
        self.record = TokenRecord()
        self.steps: list[StepRecord] = []
        self.actions: list[ActionRecord] = []
        self.generated_tokens = 0

    # -- what the program may ask ------------------------------------------------------------------

    @property
    def seed(self) -> int:
        """The seed of this trajectory."""
        return self._seed

    @property
    def max_context_tokens(self) -> int:
        """Longest context, prompt and generated tokens together."""
        return self._services.budget.max_context_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens in the record, and those that were appended and are not sent yet."""
        self._render()
        return len(self.record)

    @property
    def done(self) -> bool:
        """True when no further step is allowed."""
        if self._exhausted():
            self._told_done = True
        return self._told_done

    @property
    def was_stopped(self) -> bool:
        """Whether the program was told that its budget is used up."""
        return self._told_done

    def append(self, role: Role, text: str) -> None:
        """Add a message for the next step."""
        self._input.append(self.record, role, text, first_step=not self.steps)

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        """Add raw token ids for the next step, masked."""
        self._input.append_tokens(self.record, token_ids, first_step=not self.steps)

    async def generate(
        self,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        ignore_eos: bool = False,
    ) -> Reply:
        """Run one LLM step over everything appended so far.

        Raises
        ------
        BudgetExhausted
            No further step is allowed; `done` says so before.
        StepLost
            The engine refuses the step, or it was lost too often.
        RuntimeError
            The step before is still awaited: a context is one conversation.

        A step that is cancelled (by ``asyncio.timeout``, for instance) leaves no token behind: the engine stops, and
        the next step starts from the same messages. Messages that are appended in between follow an empty answer.
        """
        if self._step_open:
            raise RuntimeError("generate() while the step before is awaited: await one step after the other")
        self._render()
        if self._exhausted():
            self._told_done = True
            raise BudgetExhausted(self._why_exhausted())
        budget = self._services.budget
        room = budget.max_context_tokens - len(self.record)
        step = OpenStep(
            index=len(self.steps),
            start=len(self.record),
            max_tokens=min(max_tokens or budget.max_step_tokens, room),
            temperature=self._services.sampling.temperature if temperature is None else temperature,
            ignore_eos=ignore_eos,
            submitted_s=self._services.clock(),
            came_from=self.steps[-1].engine_id if self.steps else "",
            attempt=self._cancelled,
            send_all=self._cancelled > 0,
        )
        self._step_open = True
        try:
            while not step.finished:
                step = self._take(step, await self._operation(step))
        except asyncio.CancelledError:
            self._give_up(step)
            raise
        finally:
            self._step_open = False
        self._cancelled = 0
        return self._close(step)

    def _give_up(self, step: OpenStep) -> None:
        """The program has cancelled the step, or the run is interrupted: tokens that it sampled are dropped."""
        self._cancelled = step.attempt + 1
        self.record = self.record.fork(step.start)
        self.generated_tokens -= step.generated
        # The policy's turn has begun in the prompt, and what is appended next has to end it.
        self._input.turn_ended = False
        if not (self.interrupted or self._replayed_cancel):
            self._journal("step-cancelled", {"step_index": step.index})
        self._replayed_cancel = False

    async def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        cpus: tuple[int, int] = (1, 1),
        kind: ActionKind = "tool",
        label: str | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a function as an action on the tool pool and return its value.

        Raises
        ------
        ActionFailed
        """
        least, most = cpus
        if not 0 <= least <= most:
            raise ValueError(f"cpus=({least}, {most}): use (least, most) with 0 <= least <= most")
        name = str(label or getattr(function, "__name__", type(function).__name__))
        index = len(self.actions)
        submitted_s = self._services.clock()
        # Its place in the list is fixed now: actions of one trajectory may run side by side.
        self.actions.append(_pending_action(index, len(self.steps) - 1, kind, name, submitted_s))
        body = self._recorded.actions.pop(index, None)
        if body is not None:
            if body["label"] != name:
                raise ReplayDiverged(f"action {index} is {name}; the journal holds {body['label']}")
            outcome = action_from_body(body)
        else:
            if timeout_s is None:
                timeout_s = self._services.budget.tool_timeout_s
            call = ActionCall(
                self._services.session,
                action_id=f"{self._spec.trajectory_id}/a{index}",
                payload=cloudpickle.dumps((function, args, kwargs)),
                timeout_s=None if timeout_s == math.inf else timeout_s,
                idempotency_key=f"{self._services.session}/{self._spec.trajectory_id}/a{index}",
                on_loop=inspect.iscoroutinefunction(function),
                max_bytes=self._services.budget.max_action_bytes,
            )
            outcome = await self._run_action(call, kind, name, (least, most))
            self._journal("action", {"action_index": index, "label": name, **action_body(outcome)})
        self._close_action(index, outcome)
        if outcome.status != "ok":
            raise ActionFailed(
                outcome.status, f"action {name} {outcome.status}: {outcome.message}", outcome.detail
            )
        return cloudpickle.loads(outcome.value)

    # -- steps -------------------------------------------------------------------------------------

    async def _operation(self, step: OpenStep) -> StepResult:
        """The next journalled result of this step, or one from an engine."""
        if self._recorded.steps:
            body = self._recorded.steps.popleft()
            if "cancelled" in body and body["step_index"] == step.index:
                # The program will cancel this step, as it did in the recorded run.
                self._replayed_cancel = True
                await asyncio.Event().wait()
            self._held.not_sent()  # the first real step brings everything
            if (body["step_index"], body.get("context_tokens")) != (step.index, len(self.record)):
                held = "that was given up" if "cancelled" in body else f"over {body['context_tokens']}"
                raise ReplayDiverged(
                    f"step {step.index} over {len(self.record)} tokens; the journal holds step "
                    f"{body['step_index']} {held}"
                )
            return step_from_body(body)
        asked_s = self._services.clock()
        result = await self._ask(step)
        if result.status in ("ok", "aborted"):
            # Waiting for an engine and for a slot, and the control plane; a wait inside the engine comes on top.
            outside_s = max(0.0, self._services.clock() - asked_s - result.run_s)
            inside_s = 0.0 if math.isnan(result.queue_s) else result.queue_s
            result = replace(result, queue_s=outside_s + inside_s)
            self._journal("step", step_body(step.index, len(self.record), result))
        return result

    async def _ask(self, step: OpenStep) -> StepResult:
        request = StepRequest(
            StepId(self._spec.trajectory_id, step.index, step.attempt),
            len(self.record),
            step.max_tokens - step.generated,
        )
        delta = self._held.delta(self.record, step.send_all)
        call = StepCall(
            session=self._services.session,
            step_id=request.step_id,
            base_tokens=delta.base_tokens,
            base_crc=delta.base_crc,
            delta=delta.token_ids,
            max_tokens=request.max_new_tokens,
            temperature=step.temperature,
            top_p=self._services.sampling.top_p,
            seed=(self._seed * 1_000_003 + step.index * 1_009 + step.parts) % 2**31,
            ignore_eos=step.ignore_eos,
            stop_token_ids=self._services.template.end_token_ids,
        )
        try:
            return await self._services.submitter.step(call, request)
        except Interrupted as interrupt:
            if interrupt.kind == "given-up":
                return StepResult(status="refused", message=interrupt.cause)
            return StepResult(status="engine-lost", message=interrupt.cause)

    def _take(self, step: OpenStep, result: StepResult) -> OpenStep:
        """Fold one answer into the record and the open step."""
        if result.status == "refused":
            raise StepLost(f"step {step.index}: {result.message}")
        attempt = step.attempt + 1
        if result.status in ("engine-lost", "context-missing"):
            lost = attempt - self._cancelled
            if lost >= self._services.retries.max_step_attempts:
                raise StepLost(f"step {step.index} was lost {lost} times: {result.message}")
            # With the engine, the worker's copy of the context may be gone: send everything.
            return step.asked_again()
        ids = np.frombuffer(result.token_ids, dtype="<i4")
        self._append_sampled(ids, result)
        self._held.answered(self.record, result.token_ids)
        self.generated_tokens += len(ids)
        step = step.with_part(result, len(ids))
        if result.status == "aborted" and step.generated >= step.max_tokens:
            return replace(step, last=replace(result, status="ok", finish_reason="length"))
        return step

    def _append_sampled(self, ids: Any, result: StepResult) -> None:
        if not len(ids):
            return  # stopped before its first token: no policy has sampled anything
        logprobs = np.frombuffer(result.logprobs, dtype="<f4")
        for span in result.version_spans or (VersionSpan(result.policy_version, 0, len(ids)),):
            part = slice(span.start, span.stop)
            self.record.append_sampled(ids[part], logprobs[part], span.policy_version)

    def _close(self, step: OpenStep) -> Reply:
        last = step.last
        assert last is not None, step
        self.steps.append(step.as_record(len(self.record), self._services.clock()))
        ids = self.record.token_ids[step.start :]
        self._input.turn_ended = len(ids) > 0 and int(ids[-1]) in self._services.template.end_token_ids
        return Reply(
            text=self._services.template.decode(ids.tolist()),
            token_ids=tuple(ids.tolist()),
            logprobs=tuple(self.record.logprobs[step.start :].tolist()),
            finish_reason="stop" if last.finish_reason == "stop" else "length",
            engine_s=step.engine_s,
        )

    def _exhausted(self) -> bool:
        budget = self._services.budget
        return len(self.steps) >= budget.max_steps or self.context_tokens >= budget.max_context_tokens

    def _why_exhausted(self) -> str:
        budget = self._services.budget
        if len(self.steps) >= budget.max_steps:
            return f"it used its {budget.max_steps} steps"
        return f"its context of {len(self.record)} tokens fills the limit of {budget.max_context_tokens}"

    def _render(self) -> None:
        """Turn what was appended into tokens of the record."""
        self._input.render(self.record, first_step=not self.steps)

    # -- actions -----------------------------------------------------------------------------------

    async def _run_action(
        self, call: ActionCall, kind: ActionKind, name: str, cpus: tuple[int, int]
    ) -> ActionOutcome:
        if call.body_bytes > call.max_bytes:
            return ActionOutcome("raised", message=too_large("arguments", call.body_bytes, call.max_bytes))
        cause = ""
        for attempt in range(self._services.retries.max_action_attempts):
            # With the same id a second attempt would find the task of the first.
            action_id = ActionId(f"{call.action_id}~{attempt}" if attempt else call.action_id)
            request = ActionRequest(action_id, self._spec.trajectory_id, kind, name, *cpus, "cpu")
            try:
                return await self._services.submitter.action(replace(call, action_id=action_id), request)
            except Interrupted as interrupt:
                cause = interrupt.cause
                if interrupt.kind == "given-up":
                    return ActionOutcome("lost", message=cause)
        return ActionOutcome("lost", message=f"{cause} every time")

    def _close_action(self, index: int, outcome: ActionOutcome) -> None:
        finished_s = self._services.clock()
        pending = self.actions[index]
        self.actions[index] = replace(
            pending,
            cpus=outcome.cpus,
            status=outcome.status,
            finished_s=finished_s,
            queue_s=max(0.0, finished_s - pending.submitted_s - outcome.run_s),
            run_s=outcome.run_s,
        )

    # -- the journal -------------------------------------------------------------------------------

    def _journal(self, kind: str, body: dict[str, Any]) -> None:
        self._services.journal(kind, {"trajectory_id": self._spec.trajectory_id, **body})


def _pending_action(index: int, after: int, kind: str, label: str, at: float) -> ActionRecord:
    nan = float("nan")
    return ActionRecord(index, after, kind, label, 0, "pending", at, nan, nan, nan)
