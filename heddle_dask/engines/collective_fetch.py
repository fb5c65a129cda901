"""Has an engine receive weights that the trainer broadcasts, while the engine generates.

The rollout worker asks the trainer for the manifest and for a place in its next broadcast, and passes the place on to
the engine, whose processes join the broadcast. No file is written, and none has to be shared.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import EngineRefused, EngineUnreachable
from heddle_dask.engines.dialect import Dialect, WeightTransferDialect
from heddle_dask.engines.node_weights import FetchStopped, NodeWeightsDirectory
from heddle_dask.http_client import cluster_session, failures, time_limit
from heddle_dask.weights.collective import CollectiveUri
from heddle_dask.weights.manifest import WeightManifest, WeightsRefused

# The trainer sends one version after another, so that a place may take the time of a broadcast.
_PLACE_S = 900.0
# An engine answers between two iterations, and a long prefill is one.
_ENGINE_S = 120.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """Verified weights in the processes of an engine, which go with it."""

    version: PolicyVersion
    client: EngineClient

    def release(self) -> None:
        """The engine drops them when it loads them, and when it receives others."""


class CollectiveFetch:
    """Fetches for one engine."""

    def __init__(self, client: EngineClient, dialect: Dialect, copies: NodeWeightsDirectory) -> None:
        if not isinstance(dialect, WeightTransferDialect):
            raise WeightsRefused("engines of this kind receive no weights from a collective:// store")
        self._client = client
        self._dialect = dialect
        self._copies = copies

    async def fetch(self, uri: str, version: PolicyVersion, stop: threading.Event) -> EngineWeights:
        """Let the engine receive a version; see `NodeWeightsDirectory.fetch`."""
        place = CollectiveUri.parse(uri)
        asked = {"lineage": version.lineage, "number": version.number}
        manifest = WeightManifest.from_json(await _asked_trainer(place, "manifest", asked))
        await asyncio.to_thread(self._copies.check, manifest, version, self._client.version)
        workers = await self._workers()
        seat = {"ranks": len(workers), "device": str(workers[0]["device"])}
        meeting = json.loads(await _asked_trainer(place, "place", asked | seat))
        await self._ask(
            self._dialect.RECEIVE_WEIGHTS_PATH,
            self._dialect.receive_weights_body({"manifest": manifest.to_json(), **meeting}),
        )
        while True:
            workers = await self._workers()
            if all(worker["ended"] for worker in workers):
                break
            if stop.is_set():
                raise FetchStopped("a newer version is wanted")
            await asyncio.sleep(_POLL_S)
        causes = [worker["cause"] for worker in workers if worker["cause"]]
        if causes or any(worker["version"] != str(version) for worker in workers):
            raise WeightsRefused(causes[0] if causes else f"the engine has received others than {version}")
        return EngineWeights(version, self._client)

    async def _workers(self) -> Sequence[Mapping[str, Any]]:
        dialect = self._dialect
        answer = await self._ask(dialect.RECEIVED_WEIGHTS_PATH, dialect.received_weights_body())
        return dialect.received_weights(answer)

    async def _ask(self, path: str, body: bytes) -> bytes:
        try:
            return await self._client.ask(path, body, _ENGINE_S)
        except (EngineRefused, EngineUnreachable) as error:
            raise WeightsRefused(
                f"the engine does not receive weights: {error}; let `heddle train --store collective://…` start its "
                "engines"
            ) from error


async def _asked_trainer(place: CollectiveUri, question: str, body: Mapping[str, Any]) -> bytes:
    try:
        async with (
            cluster_session() as session,
            session.post(f"{place.url}/{question}", json=body, timeout=time_limit(_PLACE_S)) as response,
        ):
            answer = await response.read()
            if response.status == 200:
                return answer
            told = answer.decode(errors="replace")
    except failures() as error:
        told = f"{type(error).__name__}: {error}"
    raise WeightsRefused(f"the trainer at {place.network}: {' '.join(told.split())[:300]}")
