"""Changes of weights of an emulated engine: vLLM's endpoints for them, the time that loading takes, and faults.

The tokens of an emulated engine do not depend on its weights; their labels do.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from heddle_dask.engines import wire
from heddle_dask.engines.emulated.steps import BadRequest, EmulatedEngine
from heddle_dask.engines.emulated.traits import EmulatedFaults, Emulation
from heddle_dask.weights.manifest import WeightsRefused
from heddle_dask.weights.tensor_files import read_header


async def json_object(request: web.Request) -> dict[str, Any]:
    try:
        value = json.loads(await request.read())
    except ValueError as error:
        raise BadRequest(f"JSON decode error: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.")
    return value


_Route = tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]]


class LoadFailed(Exception):
    """Weights were not loaded; the request answers HTTP 500, as vLLM's does."""


class EmulatedWeightUpdates:
    """The endpoints of one emulated engine."""

    def __init__(self, engine: EmulatedEngine, emulation: Emulation, faults: Callable[[], EmulatedFaults]) -> None:
        self._engine = engine
        self._emulation = emulation
        self._faults = faults

    def routes(self) -> tuple[_Route, ...]:
        """Method, path and handler of each endpoint but that of `load`."""
        return (
            ("POST", wire.PAUSE_PATH, self._pause),
            ("POST", wire.RESUME_PATH, self._resume),
            ("POST", wire.DROP_KV_PATH, self._drop_kv),
            ("POST", wire.LABEL_PATH, self._relabel),
            ("GET", "/weight_info", self._info),
        )

    async def _pause(self, request: web.Request) -> web.Response:
        if request.query.get("mode") != "keep":
            raise BadRequest("An emulated engine pauses in mode keep only.")
        self._engine.pause()
        return web.json_response({"status": "paused"})

    async def _resume(self, _request: web.Request) -> web.Response:
        self._engine.resume()
        return web.json_response({"status": "resumed"})

    async def _drop_kv(self, _request: web.Request) -> web.Response:
        if not self._engine.drop_kv():
            raise LoadFailed("Failed to reset KV cache even when all the running requests are preempted.")
        return web.json_response({"success": True})

    async def load(self, request: web.Request) -> web.Response:
        """Answer a call of `wire.LOAD_WEIGHTS_PATH`."""
        body = await json_object(request)
        directory = (body.get("kwargs") or {}).get("weights_path")
        if body.get("method") != wire.LOAD_WEIGHTS_METHOD or not isinstance(directory, str):
            raise BadRequest(f"An emulated engine runs {wire.LOAD_WEIGHTS_METHOD} with a weights_path only.")
        faults = self._faults()
        if faults.crash_on_load:
            print("RuntimeError: crashed as asked (fault)", file=sys.stderr, flush=True)
            os._exit(1)
        await asyncio.sleep(faults.load_delay_s)
        if faults.fail_load is not None:
            raise LoadFailed(faults.fail_load)
        seconds = self._emulation.load_fixed_s + _size(directory) / self._emulation.load_bytes_per_s
        await asyncio.sleep(seconds * self._engine.scale)
        return web.json_response({"results": [None]})

    async def _relabel(self, request: web.Request) -> web.Response:
        label = (await json_object(request)).get("new_version")
        if not isinstance(label, str):
            raise BadRequest("new_version must be a string.")
        self._engine.relabel(label)
        return web.json_response({"success": True, "new_version": label})

    async def _info(self, _request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._engine.label})


def _size(directory: str) -> int:
    """Bytes of a model directory's weights, all of which can be read."""
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise LoadFailed(f"Cannot find any model weights with `{directory}`")
    try:
        for file in files:
            read_header(file)
    except (OSError, WeightsRefused) as error:
        raise LoadFailed(str(error)) from error
    return sum(file.stat().st_size for file in files)
