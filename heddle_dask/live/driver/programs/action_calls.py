"""The actions of one branch: replayed from the journal, or run on the tool pool and journalled.

Each attempt at an action is a request of its own, so that the controller grants and counts it: it also decides when a
repetition may start.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from heddle_dask.core.errors import encodable_text
from heddle_dask.core.ids import ActionId
from heddle_dask.core.nouns import ActionRequest
from heddle_dask.core.quotas import REPEATED
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.environments.actions import FunctionCall
from heddle_dask.environments.base import ActionFailed
from heddle_dask.live.driver.connection.submission import Interrupted, Submitter
from heddle_dask.live.driver.programs.action_results import value_body, value_from_body
from heddle_dask.live.driver.programs.branch import BranchPort, ReplayDiverged
from heddle_dask.live.wire.messages import ActionCall, ActionOutcome, CallPlace, too_large
from heddle_dask.live.wire.result_codec import action_body, action_from_body
from heddle_dask.records.trajectory import ActionRecord


class SandboxDiffers(Exception):
    """A sandbox was to be rebuilt on another worker, and one of its commands had another output there."""


class ActionCalls:
    """Calls of functions by the program of one branch."""

    def __init__(self, port: BranchPort) -> None:
        self._port = port
        # In the order of the calls; those that run have the status ``"pending"``.
        self.records: list[ActionRecord] = []

    async def run(self, call: FunctionCall, after_step: int, sandbox: SandboxUse | None = None) -> Any:
        """The value of the function.

        Raises
        ------
        ActionFailed
        BadInput
            It needs what was not declared.
        ReplayDiverged
            The journal holds another call.
        RuntimeError
            The program has ended.
        """
        self._port.services.pools.check(call.wanted)
        # It may be a text of the model: a lone surrogate has no form in messages and files.
        name = encodable_text(str(call.name))
        self._port.check_goes_on("call()")
        index = len(self.records)
        submitted_s = self._port.services.clock()
        # Its place in the list is fixed now: actions of one trajectory may run side by side.
        self.records.append(_pending_action(index, after_step, call.kind, name, submitted_s))
        action_id = f"{self._port.name}/a{index}"
        body = self._port.recorded.actions.pop(index, None)
        if body is not None:
            outcome, value = _replayed(action_id, index, name, body)
        else:
            order = self._order(action_id, index, call)
            with self._port.branch.tree.waiting():
                outcome = await self._run_action(order, call, name, sandbox)
            value = self._journalled(order, index, name, outcome)
        self._close_action(index, outcome)
        if outcome.status == "sandbox-differs":
            raise SandboxDiffers(outcome.message)
        if outcome.status != "ok":
            raise ActionFailed(
                outcome.status,
                f"action {name} {outcome.status}: {outcome.message}",
                outcome.detail,
                outcome.output,
            )
        return value

    def _order(self, action_id: str, index: int, call: FunctionCall) -> ActionCall:
        services = self._port.services
        timeout_s = services.budget.tool_timeout_s if call.timeout_s is None else call.timeout_s
        return ActionCall(
            services.session,
            action_id=ActionId(action_id),
            payload=cloudpickle.dumps((call.function, call.args, call.kwargs)),
            timeout_s=None if timeout_s == math.inf else timeout_s,
            # Of a call that is made again on resume, the key of the first time.
            idempotency_key=self._port.recorded.idempotency_keys.pop(index, f"{services.session}/{action_id}"),
            place=_place_of(call),
            function=f"{getattr(call.function, '__module__', '')}.{getattr(call.function, '__qualname__', '')}",
            max_bytes=services.budget.max_action_bytes,
            max_disk_bytes=services.budget.max_action_disk_bytes,
            max_processes=services.budget.max_action_processes,
        )

    def _journalled(self, order: ActionCall, index: int, name: str, outcome: ActionOutcome) -> Any:
        """The value of a new outcome, which is journalled; None where there is none."""
        body = {"action_index": index, "label": name, **action_body(outcome)}
        value = None
        if outcome.status == "ok":
            value = cloudpickle.loads(outcome.value)
            body |= value_body(order.action_id, value, outcome.value, order.idempotency_key)
        self._port.journal("action", body)
        return value

    async def _run_action(
        self, order: ActionCall, call: FunctionCall, name: str, sandbox: SandboxUse | None
    ) -> ActionOutcome:
        if order.body_bytes > order.max_bytes:
            return ActionOutcome("raised", message=too_large("arguments", order.body_bytes, order.max_bytes))
        self._port.announce()
        services, needs = self._port.services, call.wanted
        request = ActionRequest(
            ActionId(order.action_id),
            self._port.spec.trajectory_id,
            call.kind,
            name,
            needs.demand(),
            needs.of_pool,
            needs.service,
            profile=needs.profile,
            timeout_s=order.timeout_s,
        )
        rebuilt = None
        if sandbox is not None:
            request, rebuilt = sandbox.added_to(request), sandbox.with_past
        return await outcome_of(order, request, services.submitter, services.retries, services.clock, rebuilt)

    def _close_action(self, index: int, outcome: ActionOutcome) -> None:
        finished_s = self._port.services.clock()
        pending = self.records[index]
        self.records[index] = replace(
            pending,
            cpus=outcome.cpus,
            status=outcome.status,
            finished_s=finished_s,
            queue_s=max(0.0, finished_s - pending.submitted_s - outcome.run_s),
            run_s=outcome.run_s,
            quota_s=outcome.quota_s,
            load_s=outcome.load_s,
        )


def _place_of(call: FunctionCall) -> CallPlace:
    """Coroutines of this package use what their worker has, and block no loop."""
    if not inspect.iscoroutinefunction(call.function):
        return "process"
    ours = str(getattr(call.function, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]
    return "loop" if ours else "coroutines"


def _replayed(call: str, index: int, name: str, body: Mapping[str, Any]) -> tuple[ActionOutcome, Any]:
    if body["label"] != name:
        raise ReplayDiverged(f"action {index} is {name}; the journal holds {body['label']}")
    outcome = action_from_body(body)
    return outcome, value_from_body(call, body) if outcome.status == "ok" else None


def _pending_action(index: int, after: int, kind: str, label: str, at: float) -> ActionRecord:
    nan = float("nan")
    return ActionRecord(index, after, kind, label, 0, "pending", at, nan, nan, nan)


@dataclass(frozen=True, slots=True)
class SandboxUse:
    """The sandbox of one action."""

    name: str  # unlike that of every other sandbox of all sessions
    memory_bytes: int  # reserved on its host for its life
    parent: str  # sandbox of which it is a copy; empty: of none
    # Makes function, arguments and keywords of the call again, together with the sandbox's past.
    with_past: Callable[[], tuple[Any, ...]]

    def added_to(self, request: ActionRequest) -> ActionRequest:
        return replace(
            request,
            sandbox=self.name,
            sandbox_memory_bytes=self.memory_bytes,
            sandbox_parent=self.parent,
        )


async def outcome_of(
    call: ActionCall,
    request: ActionRequest,
    submitter: Submitter,
    retries: RetryPolicy,
    clock: Callable[[], float],
    with_past: Callable[[], tuple[Any, ...]] | None = None,
) -> ActionOutcome:
    """The last outcome of an action; its times are the sums over all attempts.

    Parameters
    ----------
    clock
        Seconds, as for `RetryPolicy.max_call_s`.
    with_past
        Makes function, arguments and keywords again with all that was done in the sandbox of the action, for a worker
        that lacks it.
    """
    began_s = clock()
    number = losses = refusals = 0
    run_s = quota_s = load_s = 0.0
    while True:
        # With the same id a second attempt would find the task of the first.
        action_id = ActionId(f"{call.action_id}~{number}" if number else call.action_id)
        number += 1
        attempt = replace(request, action_id=action_id, attempt=refusals)
        try:
            outcome = await submitter.action(replace(call, action_id=action_id), attempt)
        except Interrupted as interrupt:
            losses += 1
            if interrupt.kind == "given-up":
                return ActionOutcome("lost", message=interrupt.cause, run_s=run_s, quota_s=quota_s)
            if losses >= retries.max_action_attempts:
                return ActionOutcome("lost", message=f"{interrupt.cause} every time", run_s=run_s, quota_s=quota_s)
            continue
        run_s, quota_s, load_s = run_s + outcome.run_s, quota_s + outcome.quota_s, load_s + outcome.load_s
        outcome = replace(outcome, run_s=run_s, quota_s=quota_s, load_s=load_s)
        if outcome.status == "sandbox-missing" and with_past is not None:
            losses += 1
            if losses >= retries.max_action_attempts:
                return replace(outcome, status="lost", message=f"{outcome.message} ({losses} times)")
            call = replace(call, payload=cloudpickle.dumps(with_past()))
            if call.body_bytes > call.max_bytes:
                return replace(
                    outcome, status="raised", message=too_large("arguments", call.body_bytes, call.max_bytes)
                )
            continue
        if outcome.status == "lost":  # what ran it has died
            losses += 1
            if losses >= retries.max_action_attempts:
                return replace(outcome, message=f"{outcome.message} ({losses} times)")
            continue
        if outcome.status not in REPEATED:
            return outcome
        refusals += 1
        took_s = clock() - began_s
        if refusals >= retries.max_call_attempts:
            return replace(outcome, message=f"{outcome.message} ({refusals} calls: max_call_attempts)")
        if took_s >= retries.max_call_s:
            return replace(outcome, message=f"{outcome.message} ({refusals} calls in {took_s:.0f} s: max_call_s)")
