"""A rollout worker without Dask that hosts an engine and keeps its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tornado.ioloop import IOLoop
from worlds.weight_builders import perturbed

from heddle_dask.core.commands import FetchWeights, InstallWeights
from heddle_dask.core.events import WeightsFetched, WeightsInstalled
from heddle_dask.core.ids import EngineId, PolicyVersion
from heddle_dask.engines import wire
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import (
    EngineInfo,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    VersionSpan,
)
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.health import HealthLimits
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.live.wire.envelopes import Report, Reported
from heddle_dask.live.worker.background_tasks import BackgroundTasks
from heddle_dask.live.worker.engine_host import EngineHost, Watch
from heddle_dask.live.worker.weight_keeper import WeightKeeper
from heddle_dask.weights.model_directory import model_facts
from heddle_dask.weights.store import WeightStore

CEILING_S = 60.0
WATCH = Watch(start_timeout_s=240, health=HealthLimits(0.1), backoff_s=0.05)
PROMPT = [40 + (index * 7 + index * index) % 80 for index in range(300)]
OTHER = [40 + (index * 11 + index * index * 3) % 80 for index in range(300)]
STEP_TOKENS = 300
LEAST_SAMPLED = 5
# Logprobs of equal tokens: less than 1e-4 apart by the same weights (`assert_same`), 0.0014 and more by other ones (60
# cuts, of which 25 had equal tokens).
OTHER_WEIGHTS = 2e-4


def version(number: int) -> PolicyVersion:
    return PolicyVersion("run", number)


@dataclass(frozen=True)
class Across:
    """A step that other weights went on with, from its token `cut` on."""

    result: GenerateResult
    cut: int

    @property
    def until_cut(self) -> list[int]:
        return [*PROMPT, *self.result.token_ids[: self.cut]]

    @property
    def tokens_after(self) -> int:
        return STEP_TOKENS - self.cut

    @property
    def after(self) -> GenerateResult:
        tokens, logprobs = self.result.token_ids[self.cut :], self.result.logprobs[self.cut :]
        return replace(self.result, token_ids=tokens, logprobs=logprobs)


def assert_same(one: GenerateResult, other: GenerateResult) -> None:
    """Same tokens, and logprobs that differ by no more than float32 does between a prefill and a decode."""
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@dataclass
class Owner:
    """A rollout worker without Dask: it hosts an engine, and notes what it would report."""

    spec: EngineSpec
    directory: Path
    engine_id: str = ""
    client: EngineClient | None = None
    incarnations: int = 0
    reports: list[Report] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    watch: Watch = WATCH

    def __post_init__(self) -> None:
        self.store = WeightStore(str(self.directory / "store"))
        background = BackgroundTasks(IOLoop.current(), lambda session, failure: None)
        self.weights = WeightKeeper(self, self.directory / "node", self.reports.append, background)
        self.host = EngineHost(
            self.spec,
            self.directory / "engine",
            on_ready=self._ready,
            on_lost=self._lost,
            on_start_failed=self.lost.append,
            records=self.directory,
            watch=self.watch,
        )

    def _ready(self, client: EngineClient, info: EngineInfo) -> None:
        self.client = client
        self.incarnations += 1
        self.engine_id = f"engine-{self.incarnations}"

    def _lost(self, reason: str) -> None:
        self.lost.append(reason)
        self.client, self.engine_id = None, ""

    async def until_ready(self, incarnations: int = 1) -> EngineClient:
        while self.client is None or self.incarnations < incarnations:
            await asyncio.sleep(0.02)
        return self.client

    async def until_generating(self) -> None:
        """Wait until the engine has sampled some tokens: use of KV, the other counter, is at most 1."""
        assert self.client is not None
        before = await self.client.progress()
        while True:
            now = await self.client.progress()
            if max(new - old for new, old in zip(now, before, strict=True)) >= LEAST_SAMPLED:
                return
            await asyncio.sleep(0.005)

    async def drop_kv(self) -> None:
        assert self.client is not None
        await self.client.ask(wire.DROP_KV_PATH)

    async def published_next(self) -> int:
        """Publish and fetch the version that follows the engine's."""
        assert self.client is not None
        number = self.client.version.number + 1
        assert await self.fetch(number, self.publish(number)) == ""
        return number

    async def across(self, *, keep_kv: bool) -> Across:
        """Install the next weights under a greedy step; whether it is midway then is the machine's affair."""
        for _ in range(10):
            await self.drop_kv()
            before = await self.greedy("before", PROMPT, STEP_TOKENS)
            assert (await self.greedy("other", OTHER, 2)).cached_tokens == 0
            number = await self.published_next()
            step = asyncio.ensure_future(self.greedy("across", PROMPT, STEP_TOKENS))
            await self.until_generating()
            report = await self.install(number, keep_kv)
            assert report.cause == ""
            result = await step
            assert result.finish_reason == "length" and len(result.token_ids) == STEP_TOKENS
            if len(result.version_spans) < 2:
                continue
            print(f"{self.spec.kind}, 1 step, keep_kv={keep_kv}: paused {1000 * report.paused_s:.0f} ms")
            cut = result.version_spans[0].stop
            assert result.version_spans == (
                VersionSpan(number - 1, 0, cut, "run"),
                VersionSpan(number, cut, STEP_TOKENS, "run"),
            )
            assert result.token_ids[:cut] == before.token_ids[:cut]
            if self.spec.kind == "vllm":
                # Tokens may be the same: greedy sampling runs into a loop of a few tokens by either weights.
                assert result.logprobs[cut:] != pytest.approx(before.logprobs[cut:], abs=OTHER_WEIGHTS), (
                    f"cut at {cut} of {STEP_TOKENS} tokens"
                )
            return Across(result, cut)
        raise AssertionError("no step was caught midway")

    def publish(self, number: int) -> str:
        base = self.spec.model
        return self.store.write(version(number), perturbed(base, number), model_facts(base), bucket_bytes=1_000_000)

    async def report(self) -> Reported:
        while not self.reports:
            await asyncio.sleep(0.005)
        return self.reports.pop(0).event

    async def fetch(self, number: int, uri: str) -> str:
        """Carry out an order; returns the cause of its failure."""
        return await self.fetch_version(version(number), uri)

    async def fetch_version(self, wanted: PolicyVersion, uri: str) -> str:
        self.weights.fetch(FetchWeights(EngineId(self.engine_id), wanted, uri))
        report = await self.report()
        assert isinstance(report, WeightsFetched) and report.version == wanted
        assert "\n" not in report.cause
        return report.cause

    async def install(self, number: int, keep_kv: bool = False) -> WeightsInstalled:
        return await self.install_version(version(number), keep_kv)

    async def install_version(self, wanted: PolicyVersion, keep_kv: bool = False) -> WeightsInstalled:
        self.weights.install(InstallWeights(EngineId(self.engine_id), wanted, keep_kv))
        report = await self.report()
        assert isinstance(report, WeightsInstalled) and report.version == wanted
        return report

    async def go_over(self, number: int, keep_kv: bool = False) -> float:
        """Publish, fetch and install a version; returns the pause."""
        assert await self.fetch(number, self.publish(number)) == ""
        report = await self.install(number, keep_kv)
        assert report.cause == ""
        return report.paused_s

    async def greedy(self, name: str, context: list[int], tokens: int) -> GenerateResult:
        assert self.client is not None
        sampling = SamplingParams(tokens, 0.0, ignore_eos=True)
        return await self.client.generate(GenerateRequest(name, context, sampling))

    async def serves(self, number: int) -> bool:
        return (await self.greedy("asks", PROMPT, 2)).version_spans == (VersionSpan(number, 0, 2, "run"),)


def owning(
    directory: Path,
    model_dir: str,
    scenario: Callable[[Owner], Awaitable[None]],
    watch: Watch = WATCH,
    **emulated: object,
) -> None:
    """Run a scenario on a started emulated engine."""
    options = EmulatedOptions(cost={"seconds_per_token": 0.002}, **emulated)  # type: ignore[arg-type]
    spec = EngineSpec("emulated", model_dir, slots=8, max_model_len=2048, options=options)
    owning_engine(spec, directory, scenario, watch, CEILING_S)


def owning_engine(
    spec: EngineSpec,
    directory: Path,
    scenario: Callable[[Owner], Awaitable[None]],
    watch: Watch = WATCH,
    ceiling_s: float = 500.0,
) -> None:
    """Run a scenario on an engine when it has started."""

    async def main() -> None:
        owner = Owner(spec, directory, watch=watch)
        owner.host.start()
        try:
            await owner.until_ready()
            await scenario(owner)
        finally:
            owner.weights.close()
            await owner.host.stop()

    asyncio.run(asyncio.wait_for(main(), ceiling_s))
