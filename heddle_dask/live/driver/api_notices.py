"""Lines about APIs for the user."""

from __future__ import annotations

from heddle_dask.live.wire.driver_messages import ApiNotice


def api_line(notice: ApiNotice) -> str:
    """One line: the circuit breaker of an API has opened or closed."""
    if notice.state == "open":
        return f"api {notice.api}: circuit breaker open for {notice.seconds:.1f} s: {notice.cause}"
    return f"api {notice.api}: circuit breaker {notice.state}: calls go on"
