"""A scripted control plane, and a context on it: no cluster, every way a step or action can come back."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.ids import GroupId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, StepRequest, TrajectorySpec
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.engines.contract import GenerateResult
from heddle_dask.live.driver.inputs.pools import Pools
from heddle_dask.live.driver.options import Budget, Sampling
from heddle_dask.live.driver.programs.branch import Recorded, Services
from heddle_dask.live.driver.programs.context import LiveContext
from heddle_dask.live.wire.messages import ActionCall, ActionOutcome, StepCall, StepResult
from heddle_dask.records.trajectory_prefix import TrajectoryPrefix

NEVER: Any = object()
"""The answer that does not come."""


class ScriptedPlane:
    """Answers steps by a script, and holds the context that a worker would have rebuilt."""

    def __init__(self, *script: Callable[[StepCall, list[int]], StepResult] | Exception) -> None:
        self.script = list(script)
        self.calls: list[StepCall] = []
        self.seen: list[list[int]] = []
        self.held: dict[str, list[int]] = {}
        self.forked: list[tuple[str, str]] = []
        self.outcomes: list[ActionOutcome | Exception] = []
        self.action_ids: list[str] = []
        self.idempotency_keys: list[str] = []
        self.actions: list[ActionRequest] = []
        self.payloads: list[bytes] = []

    async def step(self, call: StepCall, request: StepRequest) -> StepResult:
        delta = np.frombuffer(call.delta, dtype="<i4").tolist()
        base = self.held.get(call.step_id.trajectory_id, [])[: call.base_tokens]
        assert call.base_crc == (zlib.crc32(np.array(base, dtype="<i4").tobytes()) if base else 0)
        context = base + delta
        assert request.context_tokens == len(context)
        self.calls.append(call)
        self.seen.append(context)
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if answer is NEVER:
            await asyncio.Event().wait()
        result = answer(call, context)
        self.held[call.step_id.trajectory_id] = [*context, *result.generated.token_ids]
        return result

    def fork(self, spec: TrajectorySpec, parent: str) -> None:
        self.forked.append((spec.trajectory_id, parent))

    async def action(self, call: ActionCall, request: ActionRequest) -> ActionOutcome:
        self.action_ids.append(call.action_id)
        self.idempotency_keys.append(call.idempotency_key)
        self.actions.append(request)
        self.payloads.append(call.payload or b"")
        if self.outcomes:
            outcome = self.outcomes.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        function, args, kwargs = cloudpickle.loads(call.payload)
        return ActionOutcome("ok", cloudpickle.dumps(function(*args, **kwargs)), cpus=1, run_s=0.0)


def sampled(*ids: int, status: Any = "ok", reason: Any = "length", **facts: Any) -> Callable[..., StepResult]:
    result = StepResult(status, "e1")
    of_result = {name: facts.pop(name) for name in list(facts) if hasattr(result, name)}
    known: dict[str, Any] = {
        "cached_tokens": 0,
        "policy_version": 0,
        "queue_s": 0.0,
        "prefill_s": 0.1,
        "decode_s": 0.2,
    }
    made = GenerateResult(ids, (-0.5,) * len(ids), finish_reason=reason, **{**known, **facts})
    return lambda call, context: replace(result, generated=made.packed(), **of_result)


def lost(status: Any) -> Callable[..., StepResult]:
    return lambda call, context: StepResult(status=status, message="gone")


def context_on(
    plane: ScriptedPlane,
    model_dir: str,
    *,
    budget: Budget | None = None,
    recorded: Recorded | None = None,
    journal: list[Any] | None = None,
    retries: RetryPolicy | None = None,
    sampling: Sampling | None = None,
    template: ChatTemplate | None = None,
    pools: Pools | None = None,
    prefix: TrajectoryPrefix | None = None,
) -> LiveContext:
    lines = journal if journal is not None else []
    services = Services(
        session="s",
        submitter=plane,  # type: ignore[arg-type]
        template=template or ChatTemplate.load(model_dir),
        budget=(budget := budget or Budget()),
        max_context_tokens=budget.max_context_tokens or 4096,
        sampling=sampling or Sampling(seeded=True),
        clock=lambda: 0.0,
        journal=lambda kind, body: lines.append((kind, body)),
        retries=retries or RetryPolicy(),
        pools=pools or Pools(),
    )
    return LiveContext(services, TrajectorySpec(TrajectoryId("t"), GroupId("g")), 7, recorded, prefix=prefix)
