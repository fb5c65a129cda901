"""Errors in the form of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heddle_dask.gateway.orders import OrderRefused, RefusalKind

CODE_OF: Mapping[RefusalKind, tuple[str, str | None]] = {
    "invalid_request": ("invalid_request_error", None),
    "authentication": ("invalid_request_error", "invalid_api_key"),
    "not_found": ("invalid_request_error", "not_found"),
    "too_large": ("invalid_request_error", "request_too_large"),
    "context_length": ("invalid_request_error", "context_length_exceeded"),
    "budget": ("insufficient_quota", "insufficient_quota"),
    "overloaded": ("rate_limit_error", "rate_limit_exceeded"),
    "failed": ("server_error", "step_failed"),
}
"""Type and code of each refusal, by which clients know it."""


def openai_error(refused: OrderRefused) -> Mapping[str, Any]:
    kind, code = CODE_OF[refused.kind]
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": code}}
