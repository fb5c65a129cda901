"""The gateway of one trajectory: a key whose orders become steps of its context, and of forks of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.agent_gateway import GATEWAY_URL, agent_environment
from heddle_dask.gateway.orders import OrderRefused, StepAnswer, StepOrder
from heddle_dask.gateway.session import GatewaySession
from heddle_dask.live.driver.connection.gateway_orders import GatewayOrders
from heddle_dask.live.wire.gateway_messages import GatewayPlace, new_key

METADATA = "gateway"
"""The entry of a trajectory's metadata: its requests, and those that were refused, by kind."""


class LiveGateway:
    """Implements `heddle_dask.environments.agent_gateway.AgentGateway`, and takes the orders of its key.

    Parameters
    ----------
    session
        Where orders become steps.
    steps
        Number of steps that have ended.
    metadata
        Of the trajectory.
    """

    def __init__(
        self,
        orders: GatewayOrders,
        session: GatewaySession,
        steps: Callable[[], int],
        metadata: dict[str, Any],
        place: GatewayPlace,
    ) -> None:
        self._orders = orders
        self._session = session
        self._steps = steps
        self._metadata = metadata
        self._place = place
        self._requests = 0
        self._refused: Counter[str] = Counter()
        self._lost: list[str] = []
        self._key = new_key(orders.session)
        self.is_open = True
        orders.admit(self._key, self)
        self._note()

    @property
    def url(self) -> str:
        return GATEWAY_URL

    @property
    def loopback_url(self) -> str:
        return f"http://127.0.0.1:{self._place.port}" if self._place.port else ""

    @property
    def remote_url(self) -> str:
        return self._place.remote_url

    @property
    def key(self) -> str:
        return self._key

    @property
    def environment(self) -> Mapping[str, str]:
        return agent_environment(self.url, self.key)

    @property
    def requests(self) -> int:
        return self._requests

    @property
    def steps(self) -> int:
        return self._steps()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._orders.dismiss(self._key)
            self._closing = asyncio.ensure_future(self._session.close())

    def _note(self) -> None:
        """Keep the counts with the trajectory: whatever ends it, they are stored."""
        facts: dict[str, Any] = {"requests": self._requests}
        if self._refused:
            facts["refused"] = dict(self._refused)
        if self._lost:
            facts["lost"] = self._lost
        self._metadata[METADATA] = facts

    # -- orders ------------------------------------------------------------------------------------

    async def answer(self, order: StepOrder) -> StepAnswer:
        self._requests += 1
        try:
            return await self._session.answer(order)
        except OrderRefused as error:
            self._refused[error.kind] += 1
            raise
        except BadInput as error:
            self._refused["invalid_request"] += 1
            raise OrderRefused(str(error), "invalid_request") from None
        finally:
            self._note()

    async def count_tokens(self, order: StepOrder) -> int:
        return await self._session.count_tokens(order)

    def lost(self, cause: str) -> None:
        self._lost.append(cause)
        self._note()
