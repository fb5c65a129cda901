"""Broadcasts published weights to the engines that ask for them, one version after another.

Workers of engines ask for a manifest, and for a place in the next broadcast of its version. Those that ask at about the
same time share one; an engine that joins later, or lost its broadcast, has the next. So no list of engines is kept, and
an engine that dies costs the others one repetition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from aiohttp import web

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.engines.weight_broadcast import (
    PATIENCE_S,
    PIECE_BYTES,
    BroadcastGroup,
    Meeting,
    meeting_place,
    send_weights,
)
from heddle_dask.weights.collective import CollectiveUri
from heddle_dask.weights.manifest import WeightManifest
from heddle_dask.weights.tensor_files import RawTensor

GATHER_S: Final = 0.5
"""A broadcast begins so long after the first engine has asked: all were told of the weights at once."""
# An engine may be fetching the last version but one.
_OFFERED = 2


@dataclass(frozen=True, slots=True)
class Offer:
    """A version, and how its tensors are read, each time from the first."""

    manifest: WeightManifest
    tensors: Callable[[], Iterable[RawTensor]]


@dataclass(frozen=True, slots=True)
class Seat:
    """An engine that waits for a broadcast: how many ranks it has, and on which device; `place` is its answer."""

    version: PolicyVersion
    ranks: int
    device: str
    place: asyncio.Future[dict[str, Any]]
    connection: asyncio.Transport | None

    @property
    def is_gone(self) -> bool:
        return self.place.done() or self.connection is None or self.connection.is_closing()


class Broadcaster:
    """Sends from rank 0 of the trainer.

    Parameters
    ----------
    device
        Of the trainer: NCCL where it and all receivers have GPUs, else gloo.
    gather_s
        See `GATHER_S`.
    join_s, piece_s
        See `Meeting`.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        gather_s: float = GATHER_S,
        join_s: float = PATIENCE_S,
        piece_s: float = PATIENCE_S,
    ) -> None:
        self._device = device
        self._gather_s = gather_s
        self._limits_s = (join_s, piece_s)
        self._offers: dict[PolicyVersion, Offer] = {}
        self._waiting: list[Seat] = []
        self._rounds: asyncio.Task[None] | None = None
        self._listening: tuple[CollectiveUri, web.AppRunner] | None = None
        self._sending = ThreadPoolExecutor(1)
        self.failure = ""  # of the latest broadcast

    async def listen(self, address: CollectiveUri) -> None:
        if self._listening is not None:
            if self._listening[0].network == address.network:
                return
            await self.close()
        application = web.Application()
        application.router.add_post("/manifest", self._manifest)
        application.router.add_post("/place", self._place)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, address.host, address.port).start()
        except OSError as error:
            await runner.cleanup()
            raise BadInput(
                f"the trainer cannot listen at {address.network} for engines: {error.strerror}; let --store name an "
                "address of its machine and a free port"
            ) from None
        self._listening = (address, runner)

    def offer(self, manifest: WeightManifest, tensors: Callable[[], Iterable[RawTensor]]) -> None:
        """Send this version to engines that ask; the last two are offered."""
        self._offers.pop(manifest.version, None)
        self._offers[manifest.version] = Offer(manifest, tensors)
        while len(self._offers) > _OFFERED:
            del self._offers[next(iter(self._offers))]

    async def close(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            await listening[1].cleanup()

    async def _manifest(self, request: web.Request) -> web.Response:
        offer = self._offered(version_of(await request.json()))
        return web.Response(text=offer.manifest.to_json(), content_type="application/json")

    async def _place(self, request: web.Request) -> web.Response:
        body = await request.json()
        seat = Seat(
            self._offered(version_of(body)).manifest.version,
            int(body["ranks"]),
            str(body["device"]),
            asyncio.get_running_loop().create_future(),
            request.transport,
        )
        self._waiting.append(seat)
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._serve())
        return web.json_response(await seat.place)

    def _offered(self, version: PolicyVersion) -> Offer:
        offer = self._offers.get(version)
        if offer is None:
            offers = ", ".join(map(str, self._offers)) or "none"
            raise web.HTTPGone(text=f"it does not offer weights {version} any more, but {offers}")
        return offer

    async def _serve(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._gather_s)
            present = [seat for seat in self._waiting if not seat.is_gone]
            seats = [seat for seat in present if seat.version == present[0].version]
            self._waiting = [seat for seat in present if seat not in seats]
            offer = self._offers.get(seats[0].version) if seats else None
            if offer is not None:
                await self._broadcast(offer, seats)
            for seat in seats:
                if not seat.place.done():
                    cause = self.failure or f"it has newer weights than {seat.version}"
                    seat.place.set_exception(web.HTTPServiceUnavailable(text=cause))

    async def _broadcast(self, offer: Offer, seats: list[Seat]) -> None:
        """One broadcast; what it fails of, the receivers report as well."""
        self.failure = ""
        assert self._listening is not None
        host, (join_s, piece_s) = self._listening[0].host, self._limits_s
        size = 1 + sum(seat.ranks for seat in seats)
        on_gpus = self._device.type == "cuda" and all(seat.device == "cuda" for seat in seats)
        try:
            store = meeting_place(host, join_s)
            meeting = Meeting(host, store.port, size, "nccl" if on_gpus else "gloo", join_s, piece_s)

            def send() -> int:
                with BroadcastGroup(meeting, 0, self._device, store) as group:
                    return send_weights(group, offer.manifest, offer.tensors(), PIECE_BYTES)

            rank = 1
            for seat in seats:
                if not seat.place.done():
                    seat.place.set_result({"meeting": meeting.to_mapping(), "rank": rank})
                rank += seat.ranks
            verified = await asyncio.get_running_loop().run_in_executor(self._sending, send)
            if verified != size - 1:
                raise HeddleError(f"{size - 1 - verified} of {size - 1} ranks refused what came")
        except (HeddleError, RuntimeError, OSError, ValueError) as error:
            told = f"weights {offer.manifest.version} did not reach all engines: {error}"
            self.failure = " ".join(told.split())[:500]
            print(self.failure, flush=True)


def version_of(body: Any) -> PolicyVersion:
    return PolicyVersion(str(body["lineage"]), int(body["number"]))
