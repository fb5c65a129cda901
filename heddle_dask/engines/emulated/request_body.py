"""The body of a request to the emulated engine."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from heddle_dask.engines.emulated.steps import BadRequest


async def json_object(request: web.Request) -> dict[str, Any]:
    """The JSON object that was sent.

    Raises
    ------
    BadRequest
        It is none.
    """
    try:
        value = json.loads(await request.read())
    except ValueError as error:
        raise BadRequest(f"JSON decode error: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.")
    return value
