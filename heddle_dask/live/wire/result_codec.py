"""Results of steps and actions in the journal: JSON-able, exact, read again when a run is resumed."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import numpy as np
import numpy.typing as npt

from heddle_dask.engines.contract import VersionSpan
from heddle_dask.live.wire.messages import ActionOutcome, StepResult

_STEP_FIELDS = ("status", "engine_id", "finish_reason", "cached_tokens", "policy_version")
_STEP_TIMES = ("queue_s", "prefill_s", "decode_s", "run_s")


def step_body(step_index: int, context: npt.NDArray[np.int32], result: StepResult) -> dict[str, Any]:
    """A step's result for the journal; `context` is what the engine saw: its length and CRC-32 are kept."""
    body: dict[str, Any] = {name: getattr(result, name) for name in (*_STEP_FIELDS, *_STEP_TIMES)}
    body |= {"step_index": step_index, "context_tokens": len(context), "context_crc": context_crc(context)}
    body["version_spans"] = [list(astuple(span)) for span in result.version_spans]
    body["token_ids"] = base64.b64encode(result.token_ids).decode("ascii")
    body["logprobs"] = base64.b64encode(result.logprobs).decode("ascii")
    return body


def step_from_body(body: Mapping[str, Any]) -> StepResult:
    """Read what `step_body` made."""
    return StepResult(
        **{name: body[name] for name in (*_STEP_FIELDS, *_STEP_TIMES)},
        version_spans=tuple(VersionSpan(*span) for span in body["version_spans"]),
        token_ids=base64.b64decode(body["token_ids"]),
        logprobs=base64.b64decode(body["logprobs"]),
    )


def context_crc(context: npt.NDArray[np.int32]) -> int:
    """CRC-32 of the little-endian token ids."""
    return zlib.crc32(np.ascontiguousarray(context, dtype="<i4").tobytes())


_ACTION_FIELDS = ("status", "message", "detail", "host_id", "cpus", "run_s")
_ACTION_WAITS = ("quota_s", "load_s")


def action_body(outcome: ActionOutcome) -> dict[str, Any]:
    """An action's outcome for the journal, without its value."""
    body = {name: getattr(outcome, name) for name in (*_ACTION_FIELDS, *_ACTION_WAITS)}
    return body | {"output": outcome.output} if outcome.output else body


def action_from_body(body: Mapping[str, Any]) -> ActionOutcome:
    """Read what `action_body` made."""
    waits = {name: body[name] for name in _ACTION_WAITS if name in body}  # journals from before lack them
    values = {name: body[name] for name in _ACTION_FIELDS}
    return ActionOutcome(**values, **waits, output=body.get("output", ""))
