"""A model service on vLLM: started once, put to sleep by an eviction, and woken up by the next load.

Sleep of level 1 moves the weights to host memory, and that is the copy from which the next load restores them; level 2
drops them, for hosts without room for a copy. A sleeping server keeps its process, and on each of its GPUs the context
of its process (about 1 GiB with CUDA), so it is bound to its GPUs: on another chunk the first load starts another
server.

A CPU build of vLLM has the same endpoints, but its sleep frees no memory: an eviction then ends the process.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.health import Tell
from heddle_dask.engines.model_services.served_process import ServedProcess, ServiceClient
from heddle_dask.engines.model_services.spec import Input, Reply, ServiceFailed, ServiceRefused, ServiceSpec
from heddle_dask.engines.spec import EngineCommand
from heddle_dask.engines.vllm_command import VllmBuild, installed_vllm_build

START_TIMEOUT_S = 1200.0
_GPU_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class SleepingServer:
    """A vLLM server that sleeps and wakes up (developer mode of vLLM 0.32); see `ModelServer`."""

    client: ServiceClient
    spec: ServiceSpec

    async def sleep(self, level: int) -> None:
        """Free the GPU memory; waits for requests that run. Level 2 drops the weights as well."""
        await self.client.ask("POST", f"/sleep?level={level}&mode=wait")

    async def wake_up(self, level: int) -> None:
        """Make it resident after a sleep of this level."""
        if level == 1:
            await self.client.ask("POST", "/wake_up")
            return
        # After level 2 there are no weights in host memory: room for them first, then the files, then the KV cache.
        await self.client.ask("POST", "/wake_up?tags=weights")
        await self.client.ask("POST", "/collective_rpc", {"method": "reload_weights"})
        await self.client.ask("POST", "/wake_up?tags=kv_cache")

    async def score(self, inputs: Sequence[Input]) -> list[float]:
        """The logit of each input, from vLLM's classifier without its activation."""
        texts = [each for each in inputs if isinstance(each, str)]
        if texts and len(texts) < len(inputs):
            # One request of vLLM has inputs of one form.
            return [(await self.score([each]))[0] for each in inputs]
        given: list[Any] = [each if isinstance(each, str) else list(map(int, each)) for each in inputs]
        body = {
            "model": self.spec.model,
            "input": given,
            "use_activation": False,
            "add_special_tokens": False,
        }
        answer = await self.client.ask("POST", "/classify", body)
        rows = sorted(answer["data"], key=lambda row: row["index"])
        return [float(row["probs"][0]) for row in rows]

    async def logprobs(self, token_ids: Sequence[int], start: int) -> list[float]:
        """The logprobs of the prompt of a completion of one token."""
        ids = list(map(int, token_ids))
        if not 1 <= start <= len(ids):
            raise ServiceRefused(f"start is {start}: use 1 to {len(ids)}, the number of tokens")
        body = {
            "model": self.spec.model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        answer = await self.client.ask("POST", "/v1/completions", body)
        rows = answer["choices"][0]["prompt_logprobs"]
        return [float(rows[place][str(ids[place])]["logprob"]) for place in range(start, len(ids))]

    async def judge(self, messages: Sequence[Mapping[str, str]], max_tokens: int, temperature: float) -> Reply:
        body = {
            "model": self.spec.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        (choice,) = (await self.client.ask("POST", "/v1/chat/completions", body))["choices"]
        return {"content": choice["message"]["content"] or "", "finish_reason": str(choice["finish_reason"])}


def service_command(
    spec: ServiceSpec,
    chunk: GpuChunk,
    address: EngineAddress,
    build: VllmBuild,
    devices: Sequence[str],
    models: int,
) -> EngineCommand:
    """The command that serves a model on a chunk.

    Parameters
    ----------
    devices
        Names of the host's GPUs, in the order in which chunks count them; empty: 0, 1, 2, ….
    models
        Copies that share each GPU: each takes its part of the memory.
    """
    argv = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *("--model", str(spec.model)),
        *("--dtype", spec.dtype),
        *("--max-model-len", str(spec.max_tokens)),
        *("--max-num-seqs", str(spec.batch)),
        "--disable-uvicorn-access-log",
        *("--uds", address.socket),
    ]
    env = {"VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
    if build == "gpu":
        names = list(devices) or [str(number) for number in range(chunk.end)]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names[chunk.first : chunk.end])
        argv += ["--enable-sleep-mode", "--tensor-parallel-size", str(chunk.gpus)]
        argv += ["--gpu-memory-utilization", f"{_GPU_SHARE / models:.3f}"]
    else:
        argv += ["--enforce-eager"]
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        env["OMP_NUM_THREADS"] = str(chunk.gpus)
    return EngineCommand((*argv, *spec.extra_args), env)


class VllmBackEnd:
    """See `ModelBackEnd`.

    Parameters
    ----------
    devices, models
        As `service_command` takes them.
    """

    def __init__(
        self,
        spec: ServiceSpec,
        chunk: GpuChunk,
        devices: Sequence[str],
        models: int,
        logs: Path,
        tell: Tell = lambda line: None,
    ) -> None:
        self._spec = spec
        self._chunk = chunk
        self._devices = devices
        self._models = models
        label = f"{spec.name.replace('/', '_')}-{chunk.first}-{chunk.gpus}"
        self._new_process = partial(ServedProcess, label, logs, tell=tell)
        self._process: ServedProcess | None = None
        self._server: SleepingServer | None = None
        self._build: VllmBuild = "gpu"
        self._keep = True
        self._slept_at_level = 0

    @property
    def process_id(self) -> int:
        return 0 if self._process is None else self._process.process_id

    async def load(self, *, cold: bool, keep: bool) -> None:
        """Wake the server up, or start it: a server that has started is resident."""
        self._keep = keep
        if self._process is not None and self._process.runs and self._slept_at_level:
            assert self._server is not None
            try:
                await self._process.unless_ended(self._server.wake_up(self._slept_at_level))
            except BaseException:
                await self.stop()  # what it holds now is not known
                raise
            self._slept_at_level = 0
            return
        await self.stop()
        await self._start()

    async def _start(self) -> None:
        self._build = await asyncio.to_thread(installed_vllm_build)
        self._process = process = self._new_process()
        command = service_command(self._spec, self._chunk, process.address, self._build, self._devices, self._models)
        env: Mapping[str, str] = command.env
        self._server = SleepingServer(process.client, self._spec)
        try:
            await process.start(command.argv, env, START_TIMEOUT_S)
        except BaseException:
            await self.stop()
            raise

    async def evict(self) -> None:
        """Put the server to sleep; one whose sleep would free nothing ends."""
        assert self._server is not None and self._process is not None, "evict what was loaded"
        if self._build == "cpu":
            await self.stop()
            return
        level = 1 if self._keep else 2
        try:
            await self._process.unless_ended(self._server.sleep(level))
        except BaseException:
            await self.stop()  # its memory must be free, whatever it says
            raise
        self._slept_at_level = level

    async def drop_copy(self) -> None:
        """End a sleeping server: its weights are the copy. A resident one drops them at its eviction."""
        if self._slept_at_level:
            await self.stop()
        self._keep = False

    @property
    def server(self) -> SleepingServer:
        if self._server is None or self._slept_at_level:
            raise ServiceFailed(f"service {self._spec.name} is not resident")
        return self._server

    async def resident_bytes(self) -> int:
        """The bytes of its weights on disk, while it is resident."""
        runs = self._process is not None and self._process.runs
        return self._spec.weight_bytes if runs and not self._slept_at_level else 0

    async def ended(self) -> str:
        assert self._process is not None, "load it first"
        return await self._process.ended()

    async def stop(self) -> None:
        process, self._process, self._server = self._process, None, None
        self._slept_at_level = 0
        if process is not None:
            await process.stop()
