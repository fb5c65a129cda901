"""Passes orders of agents on to the driver of their session, and its answers to the tool worker of their gateway.

Nothing is decided here: an order becomes a step in the driver. A session that has no driver any more is told to the
gateways that have asked for it, so that no request waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from distributed import Scheduler

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import HostId
from heddle_dask.core.nouns import HostDescription
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.codec import Message
from heddle_dask.live.wire.gateway_messages import (
    AnswerBody,
    GatewayAnswer,
    GatewayCancelled,
    GatewayCancelledNotice,
    GatewayOrder,
    GatewayOrderNotice,
    GatewayPlace,
    GatewaySessionEnded,
    OpenGateway,
    StartGateway,
    packed_body,
)
from heddle_dask.live.wire.transport import Handlers, ask_worker, send

UNKNOWN = "the trajectory of this key has ended, or there never was one"
ENDED = "the run of this trajectory has ended"
_NO_WORKER = (
    "gateway(): the cluster has no tool worker, beside which a gateway runs: give it one (tool_cpus of a local "
    "cluster, a group of tool workers of a cluster file)"
)


class GatewayRelay:
    """Part of the scheduler plugin.

    Parameters
    ----------
    client_of
        The client whose session it is; None where it is not open.
    hosts
        Those that take actions, with the addresses of their workers.
    may_come
        Whether tool workers may join later.
    """

    def __init__(
        self,
        client_of: Callable[[str], str | None],
        hosts: Mapping[HostId, tuple[str, HostDescription]],
        may_come: Callable[[], bool],
    ) -> None:
        self._client_of = client_of
        self._hosts = hosts
        self._may_come = may_come
        self.orders = 0  # that have come
        self._open: dict[tuple[str, int], tuple[str, str]] = {}  # sessions and workers of open orders
        self._had_worker = False  # one that has gone may be on its way back
        self._asked: dict[str, dict[str, None]] = {}  # tool workers that have asked for each session
        self.scheduler: Scheduler

    def add_to(self, handlers: Handlers) -> None:
        handlers.take(GatewayOrder, self.order)
        handlers.take(GatewayCancelled, self.cancelled)
        handlers.take(GatewayAnswer, self.answered)
        handlers.answer(OpenGateway, self.open)

    @property
    def open_orders(self) -> int:
        """Orders that have no answer yet."""
        return len(self._open)

    async def open(self, request: OpenGateway) -> GatewayPlace:
        """Start the gateway of the first tool worker."""
        for worker, _ in list(self._hosts.values()):
            try:
                place = await ask_worker(self.scheduler, worker, StartGateway())
            except OSError:  # it is about to go
                continue
            self._had_worker = True
            return place
        if not (self._had_worker or self._may_come()):
            raise BadInput(_NO_WORKER)
        return GatewayPlace()

    def order(self, worker: str, order: GatewayOrder) -> None:
        self.orders += 1
        client = self._client_of(order.session)
        if client is None:
            refused = packed_body(AnswerBody.refusal(UNKNOWN, "authentication"))
            answer = GatewayAnswer(order.session, worker, order.gateway, order.number, refused)
            send(self.scheduler, answer, worker)
            return
        self._asked.setdefault(order.session, {})[worker] = None
        self._open[order.gateway, order.number] = order.session, worker
        notice = GatewayOrderNotice(order.session, worker, order.gateway, order.number, order.key, order.body)
        self._tell(client, notice)

    def answered(self, _: str, answer: GatewayAnswer) -> None:
        self._open.pop((answer.gateway, answer.number), None)
        send(self.scheduler, answer, answer.address)

    def cancelled(self, worker: str, cancelled: GatewayCancelled) -> None:
        for number in cancelled.numbers:
            self._open.pop((cancelled.gateway, number), None)
        client = self._client_of(cancelled.session)
        if client is not None:
            notice = GatewayCancelledNotice(
                cancelled.session, worker, cancelled.gateway, cancelled.numbers, cancelled.cause
            )
            self._tell(client, notice)

    def worker_left(self, worker: str) -> None:
        """The gateway of a tool worker is lost with it."""
        self._forget(lambda _, at: at == worker)
        for session, workers in self._asked.items():
            client = self._client_of(session)
            if workers.pop(worker, worker) is None and client is not None:
                self._tell(client, GatewayCancelledNotice(session, worker, "", (), "its tool worker was lost"))

    def session_ended(self, session: str) -> None:
        """Its driver answers no more."""
        self._forget(lambda of, _: of == session)
        for worker in self._asked.pop(session, {}):
            send(self.scheduler, GatewaySessionEnded(session, ENDED), worker)

    def _forget(self, gone: Callable[[str, str], bool]) -> None:
        for order in [order for order, place in self._open.items() if gone(*place)]:
            del self._open[order]

    def _tell(self, client: str, message: Message) -> None:
        dask.send_to_client(self.scheduler, client, message.to_wire())
