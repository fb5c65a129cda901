"""Serve a trainer on a Unix socket: ``python -m pipelines.grpo --config FILE.json --socket PATH``.

``GET /state`` says where it stands, ``POST /train`` trains on a stored batch, ``POST /publish`` copies the weights and
begins to write them into a weight store, ``POST /published`` waits until they are there, ``POST /save`` writes a
checkpoint, ``POST /keep`` names the best model, ``POST /export`` writes a model directory. A worker that hosts a
trainer starts it and gives the orders. The file is a `TrainerSpec` as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.isolation.output_streams import keep_output_alive
from heddle_dask.training.trainer import TrainerState, TrainReport
from heddle_dask.training.trainer_spec import TrainerSpec
from heddle_dask.weights.collective import CollectiveUri, is_collective
from heddle_dask.weights.store import WeightStore
from pipelines.grpo.broadcasting import Broadcaster, version_of
from pipelines.grpo.policy import device_of
from pipelines.grpo.progress import PROGRESS
from pipelines.grpo.ranks import CopiedWeights, Ranks, prepare_process
from pipelines.unix_server import errors_as_json, serve_on_socket

_EXIT_BAD_INPUT = 2
# Time for an error to reach the one who asked, before the process ends.
_SAID_S = 0.5


# The first that fits.
_STATUSES = {BadInput: 400, HeddleError: 507}


class Server:
    def __init__(self, spec: TrainerSpec, ranks: Ranks) -> None:
        self._spec = spec
        self._ranks = ranks
        self._training = 0
        # One thread for all that torch does; another for files.
        self._torch = ThreadPoolExecutor(1)
        self._files = ThreadPoolExecutor(1)
        self._broadcaster = Broadcaster(device_of(spec, 0))
        # The latest publication: the version, the store, and what comes of it.
        self._publishing: tuple[PolicyVersion, str, asyncio.Task[str]] | None = None

    def application(self) -> web.Application:
        application = web.Application(middlewares=[errors_as_json(_STATUSES)])
        application.router.add_get("/health", self.state)
        application.router.add_get("/state", self.state)
        application.router.add_post("/train", self.train)
        application.router.add_post("/publish", self.publish)
        application.router.add_post("/published", self.published)
        application.router.add_post("/save", self.save)
        application.router.add_post("/keep", self.keep)
        application.router.add_post("/export", self.export)
        return application

    async def state(self, request: web.Request) -> web.Response:
        """Its version and checkpoint, the batch that it trains on now (0: none), and how much it has done."""
        doing = {"training": self._training, "parts": PROGRESS.parts, "pid": os.getpid()}
        return web.json_response({**_state(self._ranks.state), **doing})

    async def train(self, request: web.Request) -> web.Response:
        body = await request.json()
        batch, version = Path(body["batch"]), version_of(body)
        loop = asyncio.get_running_loop()
        try:
            report = await loop.run_in_executor(self._torch, self._train, batch, version)
        except HeddleError:
            if self._ranks.learner.is_between_versions:
                # The process that comes after this one trains the stored batches again, from the newest checkpoint on.
                loop.call_later(_SAID_S, os._exit, 1)
            raise
        return web.json_response(_report(report))

    def _train(self, batch: Path, version: PolicyVersion) -> TrainReport:
        self._training = version.number
        try:
            return self._ranks.train(batch, version)
        except HeddleError:
            raise
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        finally:
            self._training = 0

    async def publish(self, request: web.Request) -> web.Response:
        """Answered when the weights are copied and training may go on, or when it has newer ones (``copied`` false)."""
        body = await request.json()
        version, store = version_of(body), str(body["store"])
        if self._begun(version, store) is None:
            loop = asyncio.get_running_loop()
            copied = await loop.run_in_executor(self._torch, self._ranks.weights_of, version)
            if copied is None:
                return web.json_response({"copied": False})
            keeps = bool(body.get("evaluated"))
            self._publishing = version, store, asyncio.create_task(self._publish(copied, store, keeps=keeps))
        return web.json_response({"copied": True})

    async def published(self, request: web.Request) -> web.Response:
        """The manifest of a version whose publication has begun here; null: it was begun in an earlier process."""
        body = await request.json()
        begun = self._begun(version_of(body), str(body["store"]))
        if begun is None:
            return web.json_response({"manifest": None})
        try:
            return web.json_response({"manifest": await asyncio.shield(begun)})
        except HeddleError:
            self._publishing = None
            raise

    def _begun(self, version: PolicyVersion, store: str) -> asyncio.Task[str] | None:
        if self._publishing is None or self._publishing[:2] != (version, store):
            return None
        return self._publishing[2]

    async def _publish(self, copied: CopiedWeights, store: str, *, keeps: bool) -> str:
        """Write, or offer, a copy of weights while training goes on; with `keeps` as a model directory too."""
        version, publisher = copied.record.version, self._ranks.learner.publisher
        if is_collective(store):
            await self._broadcaster.listen(CollectiveUri.parse(store))
        loop = asyncio.get_running_loop()
        if keeps and version.number:
            await loop.run_in_executor(self._files, self._ranks.write_model, copied)
        uri = await loop.run_in_executor(self._files, publisher.publish, copied.weights, version, store)
        if is_collective(store):
            manifest = await asyncio.to_thread(WeightStore(store).manifest, version)
            assert manifest is not None, uri
            self._broadcaster.offer(manifest, partial(publisher.whole, copied.weights))
        return uri

    async def save(self, request: web.Request) -> web.Response:
        """Without a version: of what it has."""
        body = await request.json()
        wanted = version_of(body) if "lineage" in body else None
        loop = asyncio.get_running_loop()
        state = await loop.run_in_executor(self._torch, partial(self._ranks.save, wanted, model=bool(body["model"])))
        return web.json_response(_state(state))

    async def keep(self, request: web.Request) -> web.Response:
        body = await request.json()
        loop = asyncio.get_running_loop()
        version, reward = version_of(body), float(body["reward"])
        path = await loop.run_in_executor(self._files, self._ranks.keep_best, version, reward)
        return web.json_response({"model": str(path)})

    async def export(self, request: web.Request) -> web.Response:
        directory = Path((await request.json())["directory"])
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._torch, self._ranks.export, directory)
        return web.json_response({})


def _state(state: TrainerState) -> dict[str, Any]:
    checkpoint = None if state.checkpoint is None else str(state.checkpoint.absolute())
    named = {"lineage": state.version.lineage, "number": state.version.number}
    return {**named, "checkpoint": checkpoint, "kept_from": state.kept_from}


def _report(report: TrainReport) -> dict[str, Any]:
    return {"state": _state(report.state), "metrics": dict(report.metrics), "seconds": dict(report.seconds)}


async def serve(spec: TrainerSpec, socket: str) -> None:
    """Load, then listen until the process is ended."""
    meeting = Path(f"{socket}.ranks")
    meeting.unlink(missing_ok=True)
    ranks = await asyncio.to_thread(Ranks, spec, meeting)
    await serve_on_socket(Server(spec, ranks).application(), socket)


def main() -> None:
    keep_output_alive()
    parser = argparse.ArgumentParser(description="Serve a trainer on a Unix socket.")
    parser.add_argument("--config", required=True, type=Path, help="JSON file with a TrainerSpec")
    parser.add_argument("--socket", required=True, help="path of the Unix socket")
    options = parser.parse_args()
    try:
        try:
            spec = TrainerSpec.from_mapping(json.loads(options.config.read_text(encoding="utf-8")))
        except BadInput:
            raise
        except (OSError, ValueError) as error:
            raise BadInput(f"--config {options.config} cannot be read: {error}") from None
        prepare_process(spec)
        asyncio.run(serve(spec, options.socket))
    except BadInput as error:
        print(f"error: {error}", flush=True)
        raise SystemExit(_EXIT_BAD_INPUT) from None


if __name__ == "__main__":
    main()
