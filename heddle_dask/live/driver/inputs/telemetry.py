"""Spans of finished trajectories for an OpenTelemetry collector, over OTLP and HTTP.

A thread makes the spans and sends them; the event loop only puts a record into a queue. The queue is bounded: what does
not fit is dropped and counted. No failure reaches the run: the first is one line, the last line counts what was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from heddle_dask.core.errors import BadInput
from heddle_dask.http_client import failures, one_line_of, outside_session, proxy_of, without_password
from heddle_dask.live.driver.settings import configured
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.views.trace.spans import Decode, Span, spans_of

MOST_WAITING = 2_000
"""Trajectories that wait to be sent; further ones are dropped."""

_AT_ONCE = 64
_REQUEST_S = 10.0
_TRIES, _PAUSE_S = 3, 0.5
_LAST_S = 5.0


@configured("otel")
@dataclass(frozen=True, slots=True)
class Telemetry:
    """Where spans go; settings: ``heddle.otel``.

    Attributes
    ----------
    endpoint
        URL of an OTLP collector over HTTP, such as ``http://localhost:4318``; None: no spans.
    headers
        Sent with each request, for collectors that ask for a key.
    texts
        Whether prompts, answers and messages of errors are in the spans.
    service
        Name of the service in the collector.

    Raises
    ------
    BadInput
        No URL, or OpenTelemetry is not installed.
    """

    endpoint: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    texts: bool = False
    service: str = "heddle"

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            parts = urlsplit(str(self.endpoint))
            if parts.scheme not in ("http", "https") or not parts.netloc:
                raise BadInput(f"telemetry: endpoint is {self.endpoint!r}: use a URL such as http://localhost:4318")
            _opentelemetry()
        if not isinstance(self.headers, Mapping):
            raise BadInput(f"telemetry: headers are {self.headers!r}: use a mapping of names to values")
        if not isinstance(self.texts, bool):
            raise BadInput(f"telemetry: texts is {self.texts!r}: use True or False")

    @property
    def url(self) -> str:
        """The URL that spans are posted to: that of the collector gets the usual path."""
        assert self.endpoint is not None
        path = urlsplit(self.endpoint).path
        return self.endpoint if path not in ("", "/") else self.endpoint.rstrip("/") + "/v1/traces"

    def sender(
        self,
        session: str,
        model: str,
        decode: Decode,
        clock: Callable[[], float],
        note: Callable[[str], None],
    ) -> SpanSender | None:
        """A sender for the trajectories of one session; None without an endpoint.

        `model` is the directory of the model; `note` is called on the running event loop.
        """
        if self.endpoint is None:
            return None
        loop = asyncio.get_running_loop()

        def noted(line: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(note, line)

        return SpanSender(
            self,
            session=session,
            model=Path(model).name,
            decode=decode,
            clock=clock,
            note=noted,
        )


class SpanSender:
    """Sends the spans of finished trajectories from a thread of its own."""

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        session: str,  # distinguishes trajectories of equal name of different sessions
        model: str,
        decode: Decode,  # tokens to text
        clock: Callable[[], float],  # seconds of the run, by which records are timed
        note: Callable[[str], None],  # takes the one line about a failure; called from any thread
    ) -> None:
        self._telemetry = telemetry
        self._session = session
        self._model = model
        self._decode = decode if telemetry.texts else None
        self._zero_s = time.time() - clock()
        self._note = note
        self._waiting: queue.Queue[TrajectoryRecord | None] = queue.Queue(MOST_WAITING)
        self._closing = threading.Event()
        self._noted = False
        proxy = proxy_of(telemetry.url)
        self._through = f" through the proxy {without_password(proxy)}" if proxy else ""
        self.sent = 0
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="heddle-spans", daemon=True)
        self._thread.start()

    def finished(self, record: TrajectoryRecord) -> None:
        """Send this trajectory soon; never waits."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self, wait_s: float = _LAST_S) -> None:
        """Send what waits, for `wait_s` at most, and say what was lost."""
        self._closing.set()
        with contextlib.suppress(queue.Full):  # then the thread ends when it has emptied the queue
            self._waiting.put_nowait(None)
        self._thread.join(wait_s)
        lost = self.dropped + (self._waiting.qsize() if self._thread.is_alive() else 0)
        if lost:
            self._note(f"note: the spans of {lost:,} trajectories were not sent to {self._telemetry.endpoint}")

    def _run(self) -> None:
        while True:
            batch = self._next()
            if batch:
                self._send(batch)
            elif self._closing.is_set() and self._waiting.empty():
                return

    def _next(self) -> list[TrajectoryRecord]:
        """What waits now; waits for the first."""
        batch: list[TrajectoryRecord] = []
        try:
            first = self._waiting.get(timeout=1.0)
            while first is not None:
                batch.append(first)
                if len(batch) == _AT_ONCE:
                    break
                first = self._waiting.get_nowait()
        except queue.Empty:
            pass
        return batch

    def _send(self, batch: Sequence[TrajectoryRecord]) -> None:
        try:
            self._post(encoded([self._spans(record) for record in batch], self._telemetry.service))
            self.sent += len(batch)
        except Exception as error:  # whatever it is, the run goes on
            self.dropped += len(batch)
            if not self._noted:
                self._noted = True
                where = f"{self._telemetry.endpoint}{self._through}"
                self._note(f"note: spans cannot be sent to {where}: {one_line_of(error)}; the run goes on")

    def _spans(self, record: TrajectoryRecord) -> Trace:
        spans = spans_of(record, model=self._model, decode=self._decode)
        return Trace(f"{self._session}/{record.trajectory_id}", self._zero_s, spans)

    def _post(self, body: bytes) -> None:
        for attempt in range(_TRIES):
            try:
                asyncio.run(self._posted(body))
                return
            except failures() as error:
                refused = getattr(error, "status", 503) not in (429, 502, 503, 504)
                if refused or attempt == _TRIES - 1 or self._closing.is_set():
                    raise
            self._closing.wait(_PAUSE_S * 2**attempt)

    async def _posted(self, body: bytes) -> None:
        url, headers = self._telemetry.url, {"Content-Type": "application/x-protobuf", **self._telemetry.headers}
        async with (
            outside_session(url, total_s=_REQUEST_S, headers=headers) as session,
            session.post(url, data=body) as answer,
        ):
            answer.raise_for_status()


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one trajectory; `zero_s` is the time of the epoch at second 0 of the run."""

    name: str
    zero_s: float
    spans: Sequence[Span]


def encoded(traces: Sequence[Trace], service: str) -> bytes:
    """An `ExportTraceServiceRequest`; ids follow from the names."""
    api = _opentelemetry()
    resource = api.Resource.create({"service.name": service})
    scope = api.InstrumentationScope("heddle_dask")
    spans = [span for trace in traces for span in _sdk_spans(api, trace, resource, scope)]
    request: bytes = api.encode_spans(spans).SerializeToString()
    return request


def _sdk_spans(api: _Api, trace: Trace, resource: Any, scope: Any) -> list[Any]:
    digest = blake2b(trace.name.encode("utf-8", "replace"), digest_size=16).digest()
    trace_id = int.from_bytes(digest, "big") or 1
    first_id = int.from_bytes(digest[:8], "big") or 1
    flags = api.TraceFlags(api.TraceFlags.SAMPLED)

    def context(number: int) -> Any:
        span_id = (first_id + number) % 2**64 or 2**63
        return api.SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags)

    spans = []
    for number, span in enumerate(trace.spans):
        status = api.Status(api.StatusCode.ERROR, span.message or None) if span.error else api.Status()
        spans.append(
            api.ReadableSpan(
                name=span.name,
                context=context(number),
                parent=context(0) if number else None,
                resource=resource,
                attributes=dict(span.attributes),
                kind=api.SpanKind.CLIENT if span.is_client else api.SpanKind.INTERNAL,
                instrumentation_scope=scope,
                status=status,
                start_time=round((trace.zero_s + span.start_s) * 1e9),
                end_time=round((trace.zero_s + max(span.start_s, span.end_s)) * 1e9),
            )
        )
    return spans


class _Api:
    """What is used of OpenTelemetry: it is an optional dependency, imported by name."""

    def __init__(self) -> None:
        trace = importlib.import_module("opentelemetry.trace")
        self.SpanContext, self.SpanKind, self.TraceFlags = trace.SpanContext, trace.SpanKind, trace.TraceFlags
        self.Status, self.StatusCode = trace.Status, trace.StatusCode
        self.ReadableSpan = importlib.import_module("opentelemetry.sdk.trace").ReadableSpan
        self.Resource = importlib.import_module("opentelemetry.sdk.resources").Resource
        util = importlib.import_module("opentelemetry.sdk.util.instrumentation")
        self.InstrumentationScope = util.InstrumentationScope
        common = importlib.import_module("opentelemetry.exporter.otlp.proto.common.trace_encoder")
        self.encode_spans = common.encode_spans


def _opentelemetry() -> _Api:
    try:
        return _Api()
    except ImportError:
        raise BadInput(
            "telemetry needs OpenTelemetry: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, "
            "or leave the endpoint away"
        ) from None
