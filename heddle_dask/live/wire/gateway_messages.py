"""The road of an agent's request: gateway process, tool worker, scheduler plugin, driver, and the answer back.

Only the two ends open a body: on the way it is bytes. A gateway process is named by its `gateway`, which no other one
ever has; requests are numbered in it. Text of a running step takes a shorter way, from the worker of its engine to the
worker of the gateway.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgpack

from heddle_dask.gateway.orders import OrderRefused, RefusalKind, StepAnswer, StepOrder
from heddle_dask.live.wire.codec import Message, Request, WireValue

# -- keys ------------------------------------------------------------------------------------------

_KEY_PREFIX = "hd"
_SECRET_BYTES = 24


def new_key(session: str) -> str:
    """The key of one trajectory: unguessable, and it names the session that knows it."""
    return f"{_KEY_PREFIX}-{session}-{secrets.token_urlsafe(_SECRET_BYTES)}"


def session_of_key(key: str) -> str:
    """The session that has made a key; empty for what is no key."""
    prefix, _, rest = key.partition("-")
    session, _, secret = rest.partition("-")
    return session if prefix == _KEY_PREFIX and secret else ""


# -- bodies ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OrderBody(WireValue):
    """An order, without what the driver has from an earlier order of the same gateway and key.

    Attributes
    ----------
    known_number, known_messages
        The messages of `order` follow so many of the order of that number; 0: all are here.
    known_tools
        Whether its tools are those of that order, and left out.
    counts
        Whether only the tokens of its prompt are to be counted.
    """

    order: StepOrder
    known_number: int = 0
    known_messages: int = 0
    known_tools: bool = False
    counts: bool = False


@dataclass(frozen=True, slots=True)
class AnswerBody(WireValue):
    """What came of an order: an answer, a number of tokens, or why there is none.

    Attributes
    ----------
    wants_all
        The driver does not know the earlier order: it is to come again with all its messages.
    """

    answer: StepAnswer | None = None
    tokens: int = 0
    refused: str = ""
    kind: str = ""
    wants_all: bool = False

    @classmethod
    def refusal(cls, message: str, kind: RefusalKind) -> AnswerBody:
        return cls(refused=message, kind=kind)

    def check(self) -> None:
        """Raise `OrderRefused` where that is what came of it."""
        if self.kind:
            raise OrderRefused(self.refused, cast(RefusalKind, self.kind))


Body = TypeVar("Body", bound=WireValue)


def packed_body(body: WireValue) -> bytes:
    packed: bytes = msgpack.packb(body.to_wire())
    return packed


def body_from(kind: type[Body], packed: bytes) -> Body:
    """The inverse of `packed_body`; raises as `WireValue.from_wire`."""
    mapping: Mapping[str, Any] = msgpack.unpackb(packed)
    return kind.from_wire(mapping)


# -- to the driver ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GatewayOrder(Message):
    """Tool worker to scheduler: an agent asks for a step. `body`: `OrderBody`."""

    session: str
    gateway: str
    number: int
    key: str
    body: bytes


@dataclass(frozen=True, slots=True)
class GatewayOrderNotice(Message):
    """Scheduler to driver: the same, and the `address` of the gateway's worker."""

    session: str
    address: str
    gateway: str
    number: int
    key: str
    body: bytes


@dataclass(frozen=True, slots=True)
class GatewayCancelled(Message):
    """Tool worker to scheduler: the clients of these orders have gone, or the gateway itself."""

    session: str
    gateway: str
    numbers: tuple[int, ...]
    cause: str = ""  # one line where the gateway has gone


@dataclass(frozen=True, slots=True)
class GatewayCancelledNotice(Message):
    """Scheduler to driver: the same. No numbers: all orders that came by that worker, which has gone."""

    session: str
    address: str
    gateway: str
    numbers: tuple[int, ...]
    cause: str = ""


# -- from the driver -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GatewayAnswer(Message):
    """Driver to scheduler, and on to the tool worker: what came of an order. `body`: `AnswerBody`."""

    session: str
    address: str
    gateway: str
    number: int
    body: bytes


@dataclass(frozen=True, slots=True)
class GatewaySessionEnded(Message):
    """Scheduler to tool worker: nobody answers the open orders of this session any more."""

    session: str
    reason: str


@dataclass(frozen=True, slots=True)
class GatewayPlace(Message):
    """Where a gateway listens.

    Attributes
    ----------
    directory
        Its directory, which holds the Unix socket; empty where there is no tool worker now.
    port
        On the loopback interface of that worker's machine.
    node
        The name of that machine.
    remote_url
        For other machines; empty where it does not listen for them.
    """

    directory: str = ""
    port: int = 0
    node: str = ""
    remote_url: str = ""


@dataclass(frozen=True, slots=True)
class OpenGateway(Request[GatewayPlace]):
    """Driver to scheduler: start the gateway of a tool worker, if there is one; refused where none will come."""

    session: str


@dataclass(frozen=True, slots=True)
class StartGateway(Request[GatewayPlace]):
    """Scheduler to tool worker: start the gateway, if it does not run."""


# -- text of running steps -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextTarget(WireValue):
    """Where the text of a step goes while it runs, with its call.

    Attributes
    ----------
    choice
        Which of the continuations of one order it is.
    sampled_tokens
        Tokens at the end of the context which earlier parts of the step have sampled.
    opening
        What the text begins with that the prompt has said already: the marker of the thinking.
    """

    address: str
    gateway: str
    number: int
    choice: int = 0
    sampled_tokens: int = 0
    opening: str = ""


@dataclass(frozen=True, slots=True)
class StepText(WireValue):
    """Text of a running step; it begins `start` characters after the beginning of the reply."""

    gateway: str
    number: int
    choice: int
    start: int
    text: str


@dataclass(frozen=True, slots=True)
class TextTaken(Message):
    """The answer to `TakeText`: more may come."""


@dataclass(frozen=True, slots=True)
class TakeText(Request[TextTaken]):
    """Engine's worker to the gateway's worker."""

    texts: tuple[StepText, ...]
