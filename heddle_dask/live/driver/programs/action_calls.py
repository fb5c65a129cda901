"""The actions of one branch: replayed from the journal, or run on the tool pool and journalled."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle

from heddle_dask.core.ids import ActionId
from heddle_dask.core.needs import Given, Needs
from heddle_dask.core.nouns import ActionRequest
from heddle_dask.environments.base import ActionFailed, ActionKind
from heddle_dask.live.driver.programs.action_attempts import outcome_of
from heddle_dask.live.driver.programs.action_options import check_call
from heddle_dask.live.driver.programs.action_results import value_body, value_from_body
from heddle_dask.live.driver.programs.branch_port import BranchPort
from heddle_dask.live.driver.programs.program_errors import ReplayDiverged, SandboxDiffers
from heddle_dask.live.driver.programs.sandbox_use import SandboxUse
from heddle_dask.live.wire.messages import ActionCall, ActionOutcome, too_large
from heddle_dask.live.wire.result_codec import action_body, action_from_body
from heddle_dask.records.rows import stored_text
from heddle_dask.records.trajectory import ActionRecord


class ActionCalls:
    """Calls of functions by the program of one branch.

    Attributes
    ----------
    records
        In the order of the calls; those that run have the status ``"pending"``.
    """

    def __init__(self, port: BranchPort) -> None:
        self._port = port
        self.records: list[ActionRecord] = []

    async def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        cpus: Given | None,
        needs: Needs | None,
        kind: ActionKind,
        label: str | None,
        timeout_s: float | None,
        after_step: int,
        sandbox: SandboxUse | None = None,
    ) -> Any:
        """The value of the function; the other parameters are those of the protocol.

        Raises
        ------
        ActionFailed
        BadInput
            A parameter that is not allowed.
        ReplayDiverged
            The journal holds another call.
        RuntimeError
            The program has ended.
        """
        wanted = check_call(function, cpus, needs, kind, label, timeout_s)
        self._port.services.pools.check(wanted)
        given = str(label or getattr(function, "__name__", type(function).__name__))
        # It may be a text of the model: a lone surrogate has no form in messages and files.
        name = stored_text(given)
        self._port.check_goes_on("call()")
        index = len(self.records)
        submitted_s = self._port.services.clock()
        # Its place in the list is fixed now: actions of one trajectory may run side by side.
        self.records.append(_pending_action(index, after_step, kind, name, submitted_s))
        call = f"{self._port.name}/a{index}"
        body = self._port.recorded.actions.pop(index, None)
        if body is not None:
            outcome, value = _replayed(call, index, name, body)
        else:
            order = self._order(call, index, function, args, kwargs, timeout_s)
            with self._port.branch.tree.waiting():
                outcome = await self._run_action(order, kind, name, wanted, sandbox)
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

    def _order(
        self,
        call: str,
        index: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout_s: float | None,
    ) -> ActionCall:
        services = self._port.services
        if timeout_s is None:
            timeout_s = services.budget.tool_timeout_s
        return ActionCall(
            services.session,
            action_id=ActionId(call),
            payload=cloudpickle.dumps((function, args, kwargs)),
            timeout_s=None if timeout_s == math.inf else timeout_s,
            # Of a call that is made again on resume, the key of the first time.
            idempotency_key=self._port.recorded.idempotency_keys.pop(index, f"{services.session}/{call}"),
            on_loop=inspect.iscoroutinefunction(function),
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
        self, call: ActionCall, kind: ActionKind, name: str, needs: Needs, sandbox: SandboxUse | None
    ) -> ActionOutcome:
        if call.body_bytes > call.max_bytes:
            return ActionOutcome("raised", message=too_large("arguments", call.body_bytes, call.max_bytes))
        self._port.announce()
        services = self._port.services
        request = ActionRequest(
            ActionId(call.action_id),
            self._port.spec.trajectory_id,
            kind,
            name,
            needs.demand(),
            needs.of_pool,
            needs.service,
            profile=needs.profile,
            timeout_s=call.timeout_s,
        )
        rebuilt = None
        if sandbox is not None:
            request, rebuilt = sandbox.added_to(request), sandbox.with_past
        return await outcome_of(call, request, services.submitter, services.retries, services.clock, rebuilt)

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


def _replayed(call: str, index: int, name: str, body: Mapping[str, Any]) -> tuple[ActionOutcome, Any]:
    """A journalled outcome and its value."""
    if body["label"] != name:
        raise ReplayDiverged(f"action {index} is {name}; the journal holds {body['label']}")
    outcome = action_from_body(body)
    return outcome, value_from_body(call, body) if outcome.status == "ok" else None


def _pending_action(index: int, after: int, kind: str, label: str, at: float) -> ActionRecord:
    nan = float("nan")
    return ActionRecord(index, after, kind, label, 0, "pending", at, nan, nan, nan)
