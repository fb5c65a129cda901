"""Serve one model on a Unix socket: ``python -m pipelines.model_service --socket PATH --model DIR``.

``POST /load`` (places of devices) and ``POST /evict`` make it resident and remove it; ``POST /score``, ``/logprobs``
and ``/judge`` answer while it is resident. A worker that hosts model services starts it and gives the orders.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
from pathlib import Path

import torch
from aiohttp import web

from pipelines.model_service.batches import Batches
from pipelines.model_service.device import DoesNotFit
from pipelines.model_service.served_model import NotResident, Refused, ServedModel
from pipelines.unix_server import errors_as_json, serve_on_socket

_LARGEST_BODY_BYTES = 64 << 20


_STATUSES = {Refused: 400, NotResident: 503, DoesNotFit: 409}


class Server:
    def __init__(self, model: ServedModel, batch: int) -> None:
        self._model = model
        run = model.score_batch if model.scores else model.logprobs_batch
        self._batches = Batches(run, batch)

    def application(self) -> web.Application:
        application = web.Application(middlewares=[errors_as_json(_STATUSES)], client_max_size=_LARGEST_BODY_BYTES)
        application.router.add_get("/health", self.health)
        application.router.add_post("/load", self.load)
        application.router.add_post("/evict", self.evict)
        application.router.add_post("/score", self.score)
        application.router.add_post("/logprobs", self.logprobs)
        application.router.add_post("/judge", self.judge)
        return application

    async def health(self, request: web.Request) -> web.Response:
        """Whether it is resident, with how many bytes, and how many passes it has run."""
        return web.json_response(
            {
                "resident": self._model.resident,
                "resident_bytes": self._model.resident_bytes,
                "passes": self._batches.passes,
            }
        )

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        places, copy = list(body["places"]), Path(body["copy"])
        load = functools.partial(self._model.load, places, copy, bool(body["cold"]), bool(body["keep"]))
        await self._batches.between_passes(load)
        return web.json_response({"resident_bytes": self._model.resident_bytes})

    async def evict(self, request: web.Request) -> web.Response:
        await self._batches.between_passes(self._model.evict)
        return web.json_response({})

    async def score(self, request: web.Request) -> web.Response:
        self._check("scores", self._model.scores)
        inputs = [self._model.tokens_of(each) for each in (await request.json())["inputs"]]
        return web.json_response({"scores": await self._batches.answers(inputs)})

    async def logprobs(self, request: web.Request) -> web.Response:
        self._check("logprobs", not self._model.scores)
        body = await request.json()
        ids, start = self._model.tokens_of(body["token_ids"]), int(body["start"])
        if not 1 <= start <= len(ids):
            raise Refused(f"start is {start}: use 1 to {len(ids)}, the number of tokens")
        (found,) = await self._batches.answers([ids])
        return web.json_response({"logprobs": found[start - 1 :]})

    async def judge(self, request: web.Request) -> web.Response:
        self._check("replies", not self._model.scores)
        body = await request.json()
        limits = int(body["max_tokens"]), float(body["temperature"])
        reply = functools.partial(self._model.reply, list(body["messages"]), *limits)
        return web.json_response(await self._batches.between_passes(reply))

    def _check(self, asked: str, given: bool) -> None:
        if not given:
            kind = "classifier" if self._model.scores else "causal language model"
            raise Refused(f"it gives no {asked}: its model is a {kind}")
        if not self._model.resident:
            raise NotResident("it is not resident")


async def serve(options: argparse.Namespace) -> None:
    model = await asyncio.to_thread(ServedModel, options.model, options.dtype, options.max_tokens)
    await serve_on_socket(Server(model, options.batch).application(), options.socket)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve one model on a Unix socket.")
    parser.add_argument("--socket", required=True, help="path of the Unix socket")
    parser.add_argument("--model", required=True, type=Path, help="model directory")
    parser.add_argument("--dtype", default="auto", help="type of the weights [as stored]")
    parser.add_argument("--batch", type=int, default=16, help="inputs of one pass")
    parser.add_argument("--max-tokens", type=int, default=4096, help="longest input")
    options = parser.parse_args()
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    try:
        asyncio.run(serve(options))
    except (Refused, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
