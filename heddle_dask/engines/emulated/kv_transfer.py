"""KV transfers of an emulated engine: exports pinned in its cache, imports pulled from a source that must be alive.

The parameters are vLLM's (`kv_transfer_params`). A pull is an HTTP call to the source, which takes the time of the
missing bytes, one pull at a time, and then frees the blocks. If the blocks were freed before, the source reports it
and the import fails; vLLM would read whatever the blocks contain by then.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.emulated.kv_cache import BlockAllocation
from heddle_dask.engines.emulated.steps import BadRequest, EmulatedEngine, prompt_of
from heddle_dask.engines.emulated.traits import EmulatedTraits
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.wire import ENGINE_ID_PREFIX
from heddle_dask.http_client import cluster_session

READ_PATH = "/kv_read"

_REMOTE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class TransferFailed(Exception):
    """A pull failed; the import answers HTTP 500, as vLLM's does."""


@dataclass(slots=True)
class _Export:
    prompt: Sequence[int]
    held: BlockAllocation
    expiry: asyncio.TimerHandle


class EmulatedKvTransfers:
    """Exports and imports of one emulated engine."""

    def __init__(
        self, spec: EngineSpec, traits: EmulatedTraits, engine: EmulatedEngine, address: EngineAddress
    ) -> None:
        self.engine_id = f"emulated-{os.getpid()}-{time.time_ns()}"
        self._spec = spec
        self._emulation = traits.emulation
        self._block_tokens = traits.cost.block_tokens
        self._engine = engine
        self._address = address
        self._exports: dict[str, _Export] = {}
        self._pulls: dict[str, asyncio.Future[None]] = {}
        self._link = asyncio.Lock()
        self._count = 0

    @property
    def config(self) -> dict[str, Any] | None:
        """The engine's transfer configuration in vLLM's form; None if it has no transfers."""
        if not self._spec.kv_transfer:
            return None
        extra = {"kv_lease_duration": self._emulation.kv_lease_s}
        return {"kv_connector": "emulated", "engine_id": self.engine_id, "kv_connector_extra_config": extra}

    async def run(self, body: Mapping[str, Any]) -> str:
        """Run one step, with the import before it and the export after it from its `kv_transfer_params`."""
        params = body.get("kv_transfer_params")
        if not self._spec.kv_transfer or not isinstance(params, Mapping):
            return await self._engine.run(body)
        if params.get("do_remote_decode"):
            return await self._engine.run(body, keep=self._keep)
        if params.get("do_remote_prefill") and not await self._pulled(body, params):
            return await self._aborted(body)
        return await self._engine.run(body)

    def abort(self, engine_ids: Sequence[str]) -> int:
        """End the pulls of these requests; their steps end without a token. Returns the number of pulls."""
        pulls = [self._pulls.get(name.removeprefix(ENGINE_ID_PREFIX)) for name in engine_ids]
        return sum(pull.cancel() for pull in pulls if pull is not None)

    async def read(self, question: Mapping[str, Any]) -> None:
        """Send an export's blocks to a target: take the time of the transfer, and free the blocks."""
        if question.get("engine_id") != self.engine_id:
            raise TransferFailed(f"this engine is {self.engine_id}, not {question.get('engine_id')}")
        if (question.get("model"), question.get("tp_degree")) != (self._spec.model, self._spec.tp_degree):
            raise TransferFailed(f"this engine serves {self._spec.model} at TP {self._spec.tp_degree}")
        async with self._link:
            name = str(question.get("request_id"))
            if name not in self._exports:
                raise TransferFailed(f"no blocks are kept for {name}: read before, or expired")
            transfer_bytes = int(question.get("tokens", 0)) * self._emulation.kv_bytes_per_token
            seconds = self._emulation.transfer_fixed_s
            seconds += transfer_bytes / self._emulation.transfer_bytes_per_s
            await asyncio.sleep(seconds * self._engine.scale)
        self._let_go(name)

    def let_go_of_all(self) -> None:
        """Treat all exports as expired."""
        for name in list(self._exports):
            self._let_go(name)

    async def close(self) -> None:
        for export in self._exports.values():
            export.expiry.cancel()

    # ------------------------------------------------------------------ inside

    def _keep(self, prompt: Sequence[int]) -> Mapping[str, Any] | None:
        """Pin a prompt's blocks; None if there is no room."""
        held = self._engine.pin(prompt)
        if held is None:
            return None
        self._count += 1
        name = f"export-{self._count}"
        loop = asyncio.get_running_loop()
        expiry = loop.call_later(self._emulation.kv_lease_s, self._let_go, name)
        self._exports[name] = _Export(prompt, held, expiry)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(held.blocks)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_host": self._address.socket or "127.0.0.1",
            "remote_port": self._address.port,
            "tp_size": self._spec.tp_degree,
            "remote_num_tokens": len(prompt),
            "kv_bytes": len(prompt) * self._emulation.kv_bytes_per_token,
        }

    def _let_go(self, name: str) -> None:
        # An export may be read and expire at the same time: free it once.
        export = self._exports.pop(name, None)
        if export is not None:
            export.expiry.cancel()
            self._engine.unpin(export.held, export.prompt)

    async def _pulled(self, body: Mapping[str, Any], params: Mapping[str, Any]) -> bool:
        """Pull the missing blocks of a prompt; False if the request was aborted meanwhile."""
        missing = [key for key in _REMOTE if params.get(key) is None]
        if missing:
            raise BadRequest(f"kv_transfer_params lacks {missing[0]}.")
        prompt = prompt_of(body, self._spec.named_context_tokens)
        request_id = str(body.get("request_id", ""))
        pull = asyncio.ensure_future(self._pull(prompt, params))
        self._pulls[request_id] = pull
        try:
            await asyncio.wait((pull,))
        finally:
            pull.cancel()
            del self._pulls[request_id]
        if pull.cancelled():
            return False
        pull.result()
        return True

    async def _pull(self, prompt: Sequence[int], params: Mapping[str, Any]) -> None:
        lacking = len(prompt) - self._engine.hit_tokens(prompt)
        question = {
            "engine_id": params["remote_engine_id"],
            "request_id": params["remote_request_id"],
            "model": self._spec.model,
            "tp_degree": self._spec.tp_degree,
            "tokens": lacking if lacking > self._block_tokens else 0,
        }
        port = int(params["remote_port"])
        source = EngineAddress(port=port) if port else EngineAddress(str(params["remote_host"]))
        try:
            async with (
                cluster_session(source.socket) as session,
                session.post(source.url + READ_PATH, data=json.dumps(question)) as response,
            ):
                if response.status != 200:
                    raise TransferFailed(f"source refused: {(await response.text())[:300]}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TransferFailed(f"source is unreachable: {error or type(error).__name__}") from error
        if not self._engine.insert(prompt):
            raise TransferFailed(f"no room for {len(prompt)} tokens beside the running steps")

    async def _aborted(self, body: Mapping[str, Any]) -> str:
        step = asyncio.ensure_future(self._engine.run(body))
        await asyncio.sleep(0)
        self._engine.abort([ENGINE_ID_PREFIX + str(body.get("request_id", ""))])
        return await step
