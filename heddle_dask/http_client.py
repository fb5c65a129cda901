"""Where every HTTP client of this package is made: one rule for proxies, one for time limits.

- To addresses that a user gives (`outside_session`): ``HTTP_PROXY``, ``HTTPS_PROXY`` and ``NO_PROXY`` of the
  environment, in capitals or not, say through which proxy. None leads to this machine, whatever they say.
- Between the processes of a cluster (`cluster_session`): no proxy.
- Connecting takes `CONNECT_S` at most, and an answer `ANSWER_S` where a session or a request says nothing else.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:  # it takes a tenth of a second, and drivers, which import this module, ask nothing
    import aiohttp

CONNECT_S = 10.0
ANSWER_S = 300.0


def time_limit(total_s: float | None, connect_s: float = CONNECT_S) -> aiohttp.ClientTimeout:
    """Seconds for a whole request, and for its connection."""
    import aiohttp

    return aiohttp.ClientTimeout(total=total_s, sock_connect=connect_s)


def outside_session(
    url: str, *, total_s: float | None = ANSWER_S, headers: Mapping[str, str] | None = None
) -> aiohttp.ClientSession:
    """A session for requests to the host of this URL."""
    import aiohttp

    return aiohttp.ClientSession(timeout=time_limit(total_s), headers=headers, proxy=proxy_of(url))


def cluster_session(socket: str = "", *, keepalive_s: float = 15.0, **more: Any) -> aiohttp.ClientSession:
    """A session to a process of a cluster, with any number of connections: by its Unix socket, or (empty) by TCP."""
    import aiohttp

    options: dict[str, Any] = {"limit": 0, "keepalive_timeout": keepalive_s}
    connector = aiohttp.UnixConnector(socket, **options) if socket else aiohttp.TCPConnector(**options)
    return aiohttp.ClientSession(
        connector=connector, timeout=time_limit(ANSWER_S), cookie_jar=aiohttp.DummyCookieJar(), **more
    )


def failures() -> tuple[type[Exception], ...]:
    """What a request without an answer raises."""
    import aiohttp

    return aiohttp.ClientError, TimeoutError, OSError


def proxy_of(url: str) -> str | None:
    """The proxy that the environment names for this URL, with its password; None: none is used."""
    parts = urlsplit(url)
    if _is_loopback(parts.hostname or "") or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme)
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


def one_line_of(error: BaseException) -> str:
    """What a failed request says, without passwords in URLs: errors of proxies have them."""
    return without_password(" ".join(str(error).split())) or type(error).__name__


def without_password(text: str) -> str:
    return re.sub(r"://[^/@\s']*@", "://", text)


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    return host == "localhost" or host.endswith(".localhost")
