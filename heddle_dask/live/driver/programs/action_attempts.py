"""The attempts at one action: again after the loss of its result, and after a refusal of an API, within bounds.

Each attempt is a request of its own, so that the controller grants and counts it: it also decides when a repetition
may start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cloudpickle

from heddle_dask.core.ids import ActionId
from heddle_dask.core.nouns import ActionRequest
from heddle_dask.core.quotas import REPEATED
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.live.driver.connection.submission import Interrupted, Submitter
from heddle_dask.live.wire.messages import ActionCall, ActionOutcome, too_large


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
                return ActionOutcome(
                    "lost", message=f"{interrupt.cause} every time", run_s=run_s, quota_s=quota_s
                )
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
        if outcome.status == "lost":  # the model service that it called has died
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
            return replace(
                outcome, message=f"{outcome.message} ({refusals} calls in {took_s:.0f} s: max_call_s)"
            )
