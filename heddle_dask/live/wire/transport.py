"""Sends and receives messages over Dask's connections: the one place where a message becomes a mapping.

A message is sent without an answer (`send`); a request has one (`ask_scheduler`, `ask_worker`). A `Handlers` table says
what handles which message on a scheduler or worker.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from distributed import Client, Scheduler, Worker

from heddle_dask.core.errors import BadInput
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.codec import OP, Answer, Message, Request
from heddle_dask.live.wire.envelopes import Order, Ordered, Report, Reported

M = TypeVar("M", bound=Message)
Command = TypeVar("Command", bound=Ordered)
Event = TypeVar("Event", bound=Reported)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Done(Message):
    """The answer to a request that asks for nothing but to be carried out."""


@dataclass(frozen=True, slots=True)
class Refusal(Message):
    """The answer to a request that cannot be carried out: a line that says what the user can do."""

    reason: str


def send(sender: Worker | Client | Scheduler, message: Message, worker: str = "") -> None:
    """Send a message, in order with the sender's other messages; dropped when the receiver has gone.

    Parameters
    ----------
    sender
        Workers and clients send to the scheduler, a scheduler sends to a worker.
    worker
        Address of that worker.
    """
    mapping = message.to_wire()
    if isinstance(sender, Worker):
        dask.send_from_worker(sender, mapping)
    elif isinstance(sender, Client):
        dask.send_from_client(sender, mapping)
    else:
        dask.send_to_worker(sender, worker, mapping)


async def ask_scheduler(client: Client, request: Request[Answer]) -> Answer:
    """Ask the scheduler plugin (0.3 ms) and return its answer.

    Raises
    ------
    BadInput
        The request was refused.
    OSError
        There is no connection, or it broke.
    RuntimeError
        The plugin is not registered.
    """
    name, arguments = _call_of(request)
    return _answer(request, await dask.call_scheduler(client, name, **arguments))


async def ask_over(connection: Any, request: Request[Answer]) -> Answer:
    """As `ask_scheduler`, over the connection of a cluster object to its scheduler (``scheduler_comm``)."""
    name, arguments = _call_of(request)
    return _answer(request, await dask.call_over(connection, name, **arguments))


async def ask_scheduler_at(address: str, connection_args: Mapping[str, Any], request: Request[Answer]) -> Answer:
    """Ask the plugin of the scheduler at an address, without a client.

    Raises
    ------
    BadInput, OSError, RuntimeError
        As `ask_scheduler`.
    """
    name, arguments = _call_of(request)
    return _answer(request, await dask.call_scheduler_at(address, connection_args, name, **arguments))


async def ask_worker(asker: Client | Scheduler | Worker, address: str, request: Request[Answer]) -> Answer:
    """Ask the worker at an address and return its answer.

    Raises
    ------
    BadInput
        The request was refused.
    OSError
        The worker does not answer, or has no handler of the request.
    """
    name, arguments = _call_of(request)
    return _answer(request, await dask.call_worker(asker, address, name, **arguments))


async def ask_worker_through_scheduler(client: Client, address: str, request: Request[Answer]) -> Answer:
    """Ask a worker that the client cannot reach itself; the scheduler passes request and answer on.

    Raises
    ------
    BadInput
        The request was refused.
    OSError
        The worker has left, or the scheduler has.
    """
    name, arguments = _call_of(request)
    return _answer(request, await dask.call_worker_through_scheduler(client, address, name, **arguments))


def _call_of(request: Request[Any]) -> tuple[str, dict[str, Any]]:
    arguments = request.to_wire()
    return arguments.pop(OP), arguments


def _answer(request: Request[Answer], mapping: Mapping[str, Any]) -> Answer:
    if mapping[OP] == Refusal.op:
        raise BadInput(Refusal.from_wire(mapping).reason)
    answer: Answer = request.answer.from_wire(mapping)  # type: ignore[assignment]
    return answer


@dataclass(frozen=True, slots=True)
class FaultReport(Message):
    """A worker could not do what it should, by a fault of this package."""

    session: str  # for which it should; empty: no session's own
    failure: str  # one line


Failed = Callable[[str, str], None]
"""Takes the session that something was done for (empty: no session's own), and one line about why it failed."""


@contextlib.contextmanager
def guarded(what: str, session: str, failed: Failed) -> Iterator[None]:
    """Do what Dask asks for; what it raises, a fault of this package, is told and goes no further.

    Dask closes a connection whose handler raises, and with it the worker; it only logs what hooks raise, and goes on.
    """
    try:
        yield
    except Exception as error:
        _LOG.exception("%s failed", what)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        text = " ".join(f"{type(error).__name__}: {error}".split())
        failed(session, f"{what} failed: {text} ({where})")


def tells_faults(worker: Worker) -> Failed:
    """Tell the scheduler of faults on this worker: the session ends, the worker lives."""
    return lambda session, failure: send(worker, FaultReport(session, failure))


class Handlers:
    """What a scheduler or a worker does with which message."""

    def __init__(self, failed: Failed) -> None:
        self._failed = failed
        self._rpc: dict[str, Callable[..., Any]] = {}
        self._stream: dict[str, Callable[..., Any]] = {}

    def answer(self, kind: type[Request[Answer]], handler: Callable[[Any], Coroutine[Any, Any, Answer]]) -> None:
        """Answer requests of this type; `BadInput` that the handler raises is sent as a refusal."""

        async def answer_request(**mapping: Any) -> dict[str, Any]:
            answer: Message
            try:
                answer = await handler(kind.from_wire(mapping))
            except BadInput as error:
                answer = Refusal(str(error))
            return answer.to_wire()

        self._rpc[kind.op] = answer_request

    def take(self, kind: type[M], handler: Callable[[str, M], None]) -> None:
        """Hand messages of this type to `handler`.

        Parameters
        ----------
        handler
            Takes the sender and the message. The sender is the address of a worker or the id of a client; on a worker,
            where only the scheduler sends, it is empty.

        A message that another version has sent and that cannot be read is logged, and ends the session that it names.
        """

        self._take(kind.op, kind, handler)

    def take_order(self, kind: type[Command], handler: Callable[[str, Command], None]) -> None:
        """Hand commands of this type to `handler`, with the session in whose names they are."""
        self._take(Order.operation(kind), Order, lambda _, order: handler(order.session, order.command))

    def take_report(self, kind: type[Event], handler: Callable[[str, Event], None]) -> None:
        """Hand events of this type to `handler`, with the session in whose names they are."""
        self._take(Report.operation(kind), Report, lambda _, report: handler(report.session, report.event))

    def _take(self, op: str, kind: type[Message], handler: Callable[[str, Any], None]) -> None:
        def take_message(*, worker: str = "", client: str = "", **mapping: Any) -> None:
            mapping[OP] = op  # Dask has taken it out
            session = mapping.get("session", "")
            with guarded(op, session, self._failed):
                try:
                    message = kind.from_wire(mapping)
                except (TypeError, KeyError):
                    if session:
                        raise
                    _LOG.exception("message %s of %s cannot be read", op, worker or client or "the scheduler")
                    return
                handler(worker or client, message)

        self._stream[op] = take_message

    def add_to(self, server: Scheduler | Worker) -> None:
        """Have a running scheduler or worker use this table."""
        dask.add_handlers(server, self._rpc, self._stream)
