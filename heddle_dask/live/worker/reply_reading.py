"""Has an engine read a reply by its own parsers, as a part of the step."""

from __future__ import annotations

import json

from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import GenerateResult
from heddle_dask.live.wire.messages import StepCall
from heddle_dask.live.worker.context_cache import CachedContext

_PROMPT_TOKENS = 64
"""Of the end of the prompt: it says whether the thinking is open."""


async def read_by_engine(client: EngineClient, call: StepCall, context: CachedContext, result: GenerateResult) -> str:
    """JSON text of the message that the engine reads in a reply; empty where none is asked for, or it has not ended."""
    if call.reading is None or result.finish_reason != "stop":
        return ""
    before = context.token_ids.tolist()
    start = len(before) - call.reading.sampled_tokens
    reply = call.reading.part_to_read([*before[start:], *result.token_ids], call.sampling.stop_token_ids)
    if not reply:
        return ""
    prompt = before[max(0, start - _PROMPT_TOKENS) : start]
    return json.dumps(dict(await client.read_reply(call.reading.tools, prompt, reply)))
