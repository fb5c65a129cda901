"""HTTP calls for tools and rewards: refusals of the server become `RateLimited` and `Retry`. Built on aiohttp."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from heddle_dask.environments.api_errors import RateLimited, Retry
from heddle_dask.http_client import one_line_of, outside_session
from heddle_dask.isolation.granted import report_use

RATE_LIMIT_STATUS = 429
PASSING_STATUSES = frozenset({408, 425, 500, 502, 503, 504})
"""Answers after which the same call may succeed (RFC 9110, sections 15.5 and 15.6; 425: RFC 8470)."""


class HttpRefused(Exception):
    """The server refused the call for good; the message has status and body in one line."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Status, headers (names in lower case) and body of an answer."""

    status: int
    headers: Mapping[str, str]
    text: str

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.text)


async def http_call(
    method: str,
    url: str,
    *,
    params: Mapping[str, str] | None = None,
    json_body: Any = None,
    headers: Mapping[str, str] | None = None,
    answer_within_s: float = 60.0,
    idempotency_key: str = "",
) -> HttpAnswer:
    """Make one HTTP call: a function for `Context.call`, with ``needs=Needs(api={name: 1})``.

    Each repetition is a new grant of the controller, so that it counts against the API's quota.

    Parameters
    ----------
    idempotency_key
        Sent as the header ``Idempotency-Key``: the same for every repetition of one call. The tool worker fills it in.

    Raises
    ------
    RateLimited
        Status 429; with the seconds of its ``Retry-After``.
    Retry
        Status 408, 425, 500, 502, 503 or 504 (with the seconds of its ``Retry-After``), no connection, or no answer
        within `answer_within_s`.
    HttpRefused
        Any other status of 400 and above.
    """
    import aiohttp

    sent = {**({"Idempotency-Key": idempotency_key} if idempotency_key else {}), **(headers or {})}
    try:
        async with (
            outside_session(url, total_s=answer_within_s) as session,
            session.request(method, url, params=params, json=json_body, headers=sent) as answer,
        ):
            text = await answer.text(errors="replace")
    except TimeoutError:
        raise Retry(f"{method} {url}: no answer within {answer_within_s:g} s") from None
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, aiohttp.ClientHttpProxyError) as error:
        raise Retry(f"{method} {url}: {type(error).__name__}: {one_line_of(error)}") from None
    named = {name.lower(): value for name, value in answer.headers.items()}
    line = f"{method} {url}: status {answer.status}: {text[:200]}".splitlines()[0]
    after_s = retry_after_s(named.get("retry-after", ""))
    if answer.status == RATE_LIMIT_STATUS:
        raise RateLimited(line, retry_after_s=after_s)
    if answer.status in PASSING_STATUSES:
        raise Retry(line, retry_after_s=after_s)
    if answer.status >= 400:
        raise HttpRefused(line)
    found = HttpAnswer(answer.status, named, text)
    if (tokens := tokens_of_reply(found)) is not None:
        report_use(tokens)
    return found


def tokens_of_reply(answer: HttpAnswer) -> int | None:
    """The tokens that a reply in OpenAI's form says to have used; None for another answer."""
    if '"total_tokens"' not in answer.text:
        return None
    try:
        total = answer.json()["usage"]["total_tokens"]
    except (ValueError, LookupError, TypeError):
        return None
    return total if type(total) is int and total >= 0 else None


def retry_after_s(header: str, now: datetime | None = None) -> float | None:
    """Seconds of a ``Retry-After`` header (RFC 9110, section 10.2.3): a number, or a date; None without either."""
    text = header.strip()
    if text.isdecimal():
        return float(text)
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return None
    until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    return max(0.0, (until - (now or datetime.now(UTC))).total_seconds())
