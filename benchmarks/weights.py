"""What a change of weights takes of an engine's time, with steps in flight, and what of it nobody waits for."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.tables import Column, print_measured_rows
from heddle_dask.cli.engine_option import chosen_model, engine_option
from heddle_dask.cli.shared_options import COUNT, shared_options, whole_numbers
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import GenerateRequest, GenerateResult, SamplingParams
from heddle_dask.engines.node_weights import NodeWeightsDirectory
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.vllm_command import DTYPES
from heddle_dask.weights.model_directory import model_facts, weight_files
from heddle_dask.weights.store import WeightStore
from heddle_dask.weights.tensor_files import read_tensors

_LINEAGE = "bench"
_START_S = 600.0
_PROMPT_TOKENS = 200
_BEFORE_S = 0.3


@dataclass(frozen=True, slots=True)
class WeightsRow:
    """Changes of weights with a number of steps in flight; seconds are medians.

    Attributes
    ----------
    keep_kv
        The KV of the steps was kept; else it was computed again after the pause.
    publish_s, fetch_s
        Writing a version to a store on this disk; bringing it to another directory of it, and verifying it. Both
        while the engine generates.
    paused_s, longest_paused_s
        From the request that pauses the engine to the answer of the one that resumes it.
    load_s
        The part of it in which the weights are loaded.
    lost_steps
        Steps that did not end with all their tokens.
    """

    steps: int
    keep_kv: bool
    updates: int
    weight_bytes: int
    publish_s: float
    fetch_s: float
    paused_s: float
    longest_paused_s: float
    load_s: float
    lost_steps: int


def measure_weights(spec: EngineSpec, steps: Sequence[int], updates: int) -> Iterator[WeightsRow]:
    """A row per number of steps in flight, with KV recomputed and kept."""
    with tempfile.TemporaryDirectory(prefix="heddle-bench-weights-") as folder, asyncio.Runner() as runner:
        bench = _Bench(spec, Path(folder))
        runner.run(bench.start())
        try:
            for count in steps:
                for keep_kv in (False, True):
                    yield runner.run(bench.row(count, keep_kv, updates))
        finally:
            runner.run(bench.process.stop())


class _Bench:
    def __init__(self, spec: EngineSpec, folder: Path) -> None:
        self._spec = spec
        self._store = WeightStore(str(folder / "store"))
        # A copy and no link: a store is usually another disk.
        self._node = NodeWeightsDirectory(folder / "node", spec.model, spec.dtype, link=False)
        self.process = EngineProcess(spec, folder / "engine")
        self._version = PolicyVersion(_LINEAGE, 0)
        self._asked = 0

    async def start(self) -> None:
        await self.process.start(_START_S)

    async def row(self, steps: int, keep_kv: bool, updates: int) -> WeightsRow:
        published, fetched, paused, loaded, lost = [], [], [], [], 0
        nbytes = sum(file.stat().st_size for file in weight_files(self._spec.model))
        async with EngineClient(self.process.address) as client:
            for _ in range(updates):
                running = [asyncio.ensure_future(self._step(client)) for _ in range(steps)]
                began_s = time.monotonic()
                before, self._version = self._version, PolicyVersion(_LINEAGE, self._version.number + 1)
                uri = await asyncio.to_thread(self._publish)
                published.append(time.monotonic() - began_s)
                began_s = time.monotonic()
                weights = await asyncio.to_thread(self._node.fetch, uri, self._version, before, threading.Event())
                fetched.append(time.monotonic() - began_s)
                await asyncio.sleep(_BEFORE_S)
                done = await client.install_weights(str(weights.path), self._version, keep_kv=keep_kv)
                paused.append(done.paused_s)
                loaded.append(done.load_s)
                results = await asyncio.gather(*running)
                lost += sum(result.finish_reason != "length" for result in results)
                weights.release()
                self._node.prune(self._version)
                self._store.prune(_LINEAGE, keep=1)
        return WeightsRow(
            steps=steps,
            keep_kv=keep_kv,
            updates=updates,
            weight_bytes=nbytes,
            publish_s=median(published),
            fetch_s=median(fetched),
            paused_s=median(paused),
            longest_paused_s=max(paused),
            load_s=median(loaded),
            lost_steps=lost,
        )

    def _publish(self) -> str:
        model = self._spec.model
        tensors = (tensor for file in weight_files(model) for tensor in read_tensors(file))
        return self._store.write(self._version, tensors, model_facts(model))

    async def _step(self, client: EngineClient) -> GenerateResult:
        self._asked += 1
        room = (self._spec.max_model_len or 4 * _PROMPT_TOKENS) - _PROMPT_TOKENS - 1
        prompt = [1 + (self._asked * 7 + index) % 200 for index in range(_PROMPT_TOKENS)]
        return await client.generate(
            GenerateRequest(f"step-{self._asked}", prompt, SamplingParams(room, 0.0, ignore_eos=True))
        )


COLUMNS: Sequence[Column] = (
    ("steps", lambda row: str(row.steps)),
    ("KV", lambda row: "kept" if row.keep_kv else "dropped"),
    ("MB", lambda row: f"{row.weight_bytes / 1e6:.1f}"),
    ("publish s", lambda row: f"{row.publish_s:.3f}"),
    ("fetch s", lambda row: f"{row.fetch_s:.3f}"),
    ("paused ms (longest)", lambda row: f"{1e3 * row.paused_s:.0f} ({1e3 * row.longest_paused_s:.0f})"),
    ("of it loading", lambda row: f"{1e3 * row.load_s:.0f}"),
    ("lost steps", lambda row: str(row.lost_steps)),
)


@click.command("weights")
@engine_option("vllm")
@click.option("--model", default=None, help="Model directory [default: the shipped agent].")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Type of the weights.")
@click.option("--steps", default="1,8", show_default=True, help="Steps in flight, comma-separated.")
@click.option("--updates", type=COUNT, default=5, show_default=True, help="Changes of weights for each row.")
@shared_options
def weights(engine: str, model: str | None, dtype: str, steps: str, updates: int, as_json: bool, seed: int) -> None:
    """Seconds to publish, fetch, pause and load weights while steps are in flight, on one engine of this machine."""
    counts = whole_numbers("--steps", steps, "1,8")
    spec = EngineSpec(
        engine, chosen_model(model, engine), slots=max(counts), max_model_len=2048, dtype=dtype, seed=seed
    )
    print_measured_rows(measure_weights(spec, counts, updates), COLUMNS, as_json=as_json)
