"""Results of steps and actions in the journal: JSON-able, exact, read again when a run is resumed."""

from __future__ import annotations

import base64
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import MISSING, astuple, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from heddle_dask.engines.contract import GenerateResult, VersionSpan
from heddle_dask.live.wire.messages import ActionOutcome, StepResult

# What is no plain value has a form of its own below.
_PACKED = ("token_ids", "logprobs", "version_spans")
_FACTS = tuple(each.name for each in fields(GenerateResult) if each.name not in _PACKED)
# Facts that came in later have a default: journals from before lack them.
_LATER = {each.name for each in fields(GenerateResult) if each.default is not MISSING}


def step_body(step_index: int, context: npt.NDArray[np.int32], result: StepResult) -> dict[str, Any]:
    """A step's result for the journal; `context` is what the engine saw: its length and CRC-32 are kept."""
    made = result.generated
    body: dict[str, Any] = {"status": result.status, "engine_id": result.engine_id}
    body |= {name: getattr(made, name) for name in _FACTS} | {"run_s": result.run_s}
    body |= {"step_index": step_index, "context_tokens": len(context), "context_crc": context_crc(context)}
    body["version_spans"] = [list(astuple(span)) for span in made.version_spans]
    body["token_ids"] = _text(np.asarray(made.token_ids, "<i4"))
    body["logprobs"] = _text(np.asarray(made.logprobs, "<f4"))
    return body | {"read": result.read} if result.read else body


def _text(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def step_from_body(body: Mapping[str, Any]) -> StepResult:
    generated = GenerateResult(
        token_ids=array("i", base64.b64decode(body["token_ids"])),
        logprobs=array("f", base64.b64decode(body["logprobs"])),
        version_spans=tuple(VersionSpan(*span) for span in body["version_spans"]),
        **{name: body[name] for name in _FACTS if name in body or name not in _LATER},
    )
    return StepResult(body["status"], body["engine_id"], generated, body["run_s"], read=body.get("read", ""))


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
    waits = {name: body[name] for name in _ACTION_WAITS if name in body}  # journals from before lack them
    values = {name: body[name] for name in _ACTION_FIELDS}
    return ActionOutcome(**values, **waits, output=body.get("output", ""))
