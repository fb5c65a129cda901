"""The weights of a supervised engine: fetched and installed while it works, kept when it dies, refused when wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import util
from pathlib import Path

import pytest
from tornado.ioloop import IOLoop
from worlds.trainer_process import TrainerProcess, trainer_process
from worlds.weight_builders import model_with, perturbed

from heddle_dask.core.ids import EngineId
from heddle_dask.core.policy_version import PolicyVersion
from heddle_dask.engines import wire
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import (
    EngineInfo,
    EngineUnreachable,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    VersionSpan,
)
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.ports import LOOPBACK, free_port
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.vllm_command import VllmOptions
from heddle_dask.live.wire.codec import Message
from heddle_dask.live.wire.weight_messages import (
    FetchWeightsOrder,
    InstallWeightsOrder,
    WeightsFetchedReport,
    WeightsInstalledReport,
)
from heddle_dask.live.worker.background_tasks import BackgroundTasks
from heddle_dask.live.worker.engine_host import EngineHost, Watch
from heddle_dask.live.worker.weight_keeper import WeightKeeper
from heddle_dask.weights.collective import CollectiveUri
from heddle_dask.weights.model_directory import model_facts
from heddle_dask.weights.store import WeightStore

CEILING_S = 60.0
WATCH = Watch(start_timeout_s=240, health_interval_s=0.1, backoff_s=0.05)
REAL = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
KINDS = ["emulated", pytest.param("vllm", marks=REAL)]
PROMPT = [40 + (index * 7 + index * index) % 80 for index in range(300)]


def version(number: int) -> PolicyVersion:
    return PolicyVersion("run", number)


@dataclass
class Owner:
    """A rollout worker without Dask: it hosts an engine, and notes what it would report."""

    spec: EngineSpec
    directory: Path
    engine_id: str = ""
    client: EngineClient | None = None
    incarnations: int = 0
    reports: list[Message] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    watch: Watch = WATCH

    def __post_init__(self) -> None:
        self.store = WeightStore(str(self.directory / "store"))
        background = BackgroundTasks(IOLoop.current())
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

    def publish(self, number: int) -> str:
        base = self.spec.model
        return self.store.write(
            version(number), perturbed(base, number), model_facts(base), bucket_bytes=1_000_000
        )

    async def report(self) -> Message:
        while not self.reports:
            await asyncio.sleep(0.005)
        return self.reports.pop(0)

    async def fetch(self, number: int, uri: str) -> str:
        """Carry out an order; returns the cause of its failure."""
        return await self.fetch_version(version(number), uri)

    async def fetch_version(self, wanted: PolicyVersion, uri: str) -> str:
        self.weights.fetch("", FetchWeightsOrder(EngineId(self.engine_id), wanted, uri))
        report = await self.report()
        assert isinstance(report, WeightsFetchedReport) and report.version == wanted
        assert "\n" not in report.cause
        return report.cause

    async def install(self, number: int, keep_kv: bool = False) -> WeightsInstalledReport:
        return await self.install_version(version(number), keep_kv)

    async def install_version(self, wanted: PolicyVersion, keep_kv: bool = False) -> WeightsInstalledReport:
        self.weights.install("", InstallWeightsOrder(EngineId(self.engine_id), wanted, keep_kv))
        report = await self.report()
        assert isinstance(report, WeightsInstalledReport) and report.version == wanted
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
    kind: str,
    directory: Path,
    model_dir: str,
    scenario: Callable[[Owner], Awaitable[None]],
    watch: Watch = WATCH,
    **emulated: object,
) -> None:
    """Run a scenario on a started engine."""
    if kind == "vllm" and util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    options = EmulatedOptions(cost={"seconds_per_token": 0.002}, **emulated)  # type: ignore[arg-type]
    receiving = VllmOptions(weight_transfer=True)
    spec = (
        EngineSpec("emulated", model_dir, slots=8, max_model_len=2048, options=options)
        if kind == "emulated"
        else EngineSpec("vllm", model_dir, slots=8, max_model_len=2048, dtype="float32", options=receiving)
    )

    async def main() -> None:
        owner = Owner(spec, directory, watch=watch)
        owner.host.start()
        try:
            await owner.until_ready()
            await scenario(owner)
        finally:
            owner.weights.close()
            await owner.host.stop()

    asyncio.run(asyncio.wait_for(main(), CEILING_S if kind == "emulated" else 500.0))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_go_on_under_new_weights_as_if_stopped_and_restarted_at_that_token(
    kind: str, tmp_path: Path, model_dir: str
) -> None:
    async def scenario(owner: Owner, trainer: TrainerProcess | None = None) -> None:
        before = await owner.greedy("before", PROMPT, 300)
        assert await owner.fetch(1, owner.publish(1)) == ""
        step = asyncio.ensure_future(owner.greedy("across", PROMPT, 300))
        await asyncio.sleep(0.3)
        report = await owner.install(1)
        across = await step
        print(f"{kind}, 1 step in flight: paused {1000 * report.paused_s:.0f} ms")
        old, new = across.version_spans
        cut = old.stop
        assert (old, new) == (VersionSpan(0, 0, cut), VersionSpan(1, cut, 300, "run")) and 0 < cut < 300
        assert across.finish_reason == "length" and across.token_ids[:cut] == before.token_ids[:cut]
        if kind == "vllm":
            assert across.token_ids[cut:] != before.token_ids[cut:]

        # A run that is stopped at that token and started again, with nothing cached, samples the same.
        assert owner.client is not None
        await owner.client.ask(wire.DROP_KV_PATH)
        again = await owner.greedy("again", [*PROMPT, *across.token_ids[:cut]], 300 - cut)
        assert again.token_ids == across.token_ids[cut:] and again.cached_tokens == 0

        # Killed while it installs, the engine comes back with the version before, in a new process.
        assert await owner.fetch(2, owner.publish(2)) == ""
        client, process = owner.client, owner.host._process
        assert client is not None and process is not None
        owner.weights.install("", InstallWeightsOrder(EngineId(owner.engine_id), version(2)))
        while not client.is_updating:
            await asyncio.sleep(0)
        os.kill(process.engine_pid, signal.SIGKILL)
        told = await owner.report()
        assert isinstance(told, WeightsInstalledReport) and told.cause != ""
        client = await owner.until_ready(2)
        assert client.version == version(1) and await owner.serves(1)
        # It was started from those files, the engine before had loaded them in place.
        restarted = await owner.greedy("restarted", [*PROMPT, *across.token_ids[:cut]], 300 - cut)
        assert restarted.token_ids == across.token_ids[cut:]

        # With its KV kept, a step goes on, and may sample something else.
        many = [
            asyncio.ensure_future(owner.greedy(f"many-{each}", [*PROMPT, each], 300)) for each in range(8)
        ]
        await asyncio.sleep(0.3)
        paused_s = await owner.go_over(2, keep_kv=True)
        print(f"{kind}, 8 steps in flight, KV kept: paused {1000 * paused_s:.0f} ms")
        assert {len((await step).token_ids) for step in many} == {300}
        assert await owner.serves(2)
        if trainer is not None:
            await goes_over_by_broadcast(owner, trainer)

    if kind == "emulated":
        owning(kind, tmp_path, model_dir, scenario)
        return
    trained = model_with(tmp_path / "trained", model_dir, perturbed(model_dir, 7))
    # It loads while the engine does.
    with trainer_process(trained, tmp_path / "trainer", "trained") as trainer:
        owning(kind, tmp_path, model_dir, partial(scenario, trainer=trainer))


async def goes_over_by_broadcast(owner: Owner, trainer: TrainerProcess) -> None:
    """A trainer's process broadcasts weights to the engine's, and the same weights from disk sample the same."""
    client = owner.client
    assert client is not None
    new = PolicyVersion("trained", 0)
    address = CollectiveUri(LOOPBACK, free_port(LOOPBACK), str(owner.directory / "manifests"))
    uri = await trainer.publish(new, str(address))
    assert not list((owner.directory / "manifests").rglob("*.safetensors"))
    sampling = SamplingParams(1700, 0.0, ignore_eos=True)
    step = asyncio.ensure_future(client.generate(GenerateRequest("across-2", PROMPT, sampling)))
    assert await owner.fetch_version(new, uri) == ""
    await generates(client)
    report = await owner.install_version(new)
    assert report.cause == ""
    print(f"vllm, broadcast weights: paused {1000 * report.paused_s:.0f} ms")
    await generates(client)
    await client.abort(["across-2"])
    assert [(span.lineage, span.policy_version) for span in (await step).version_spans] == [
        ("run", 2),
        ("trained", 0),
    ]
    received = await owner.greedy("received", PROMPT, 40)
    disk = PolicyVersion("disk", 1)
    tensors = perturbed(owner.spec.model, 7)
    assert (
        await owner.fetch_version(disk, owner.store.write(disk, tensors, model_facts(owner.spec.model))) == ""
    )
    assert (await owner.install_version(disk)).cause == ""
    loaded = await owner.greedy("loaded", PROMPT, 40)
    assert received.token_ids == loaded.token_ids and received.logprobs == loaded.logprobs
    assert "any more" in await owner.fetch_version(PolicyVersion("trained", 1), uri)


async def generates(client: EngineClient) -> None:
    """Wait until the engine has sampled more tokens."""
    before = await client.progress()
    while await client.progress() == before:
        await asyncio.sleep(0.01)


def test_wrong_weights_are_refused_and_the_engine_keeps_its_own(tmp_path: Path, model_dir: str) -> None:
    async def scenario(owner: Owner) -> None:
        await owner.go_over(2)
        uri = owner.publish(3)
        bucket = sorted(Path(uri).parent.glob("*.safetensors"))[1]
        content = bucket.read_bytes()
        foreign = WeightStore(str(tmp_path / "foreign")).write(
            PolicyVersion("another-run", 3), perturbed(model_dir, 3), model_facts(model_dir)
        )
        bucket.unlink()
        assert "is missing" in await owner.fetch(3, uri)
        bucket.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert "is corrupt" in await owner.fetch(3, uri)
        assert "were asked for" in await owner.fetch(3, foreign)
        assert "not newer" in await owner.fetch(1, owner.publish(1))
        assert "cannot be read" in await owner.fetch(9, str(tmp_path / "nothing" / "manifest.json"))
        assert (await owner.install(3)).cause == "weights run:3 are not at hand"
        assert await owner.serves(2)
        bucket.write_bytes(content)
        assert await owner.fetch(3, uri) == "" and (await owner.install(3)).cause == ""
        assert await owner.serves(3)
        assert owner.lost == []

    owning("emulated", tmp_path, model_dir, scenario)


def test_only_the_newest_order_is_answered_and_old_weights_are_removed(
    tmp_path: Path, model_dir: str
) -> None:
    async def scenario(owner: Owner) -> None:
        uris = {number: owner.publish(number) for number in (1, 2, 3)}
        for number, uri in uris.items():
            owner.weights.fetch("", FetchWeightsOrder(EngineId(owner.engine_id), version(number), uri))
        report = await owner.report()
        assert isinstance(report, WeightsFetchedReport) and (report.version, report.cause) == (version(3), "")
        assert (await owner.install(3)).cause == ""
        await owner.go_over(4)
        node = tmp_path / "node"
        while len([each for each in node.iterdir() if each.is_dir()]) > 1:
            await asyncio.sleep(0.02)
        assert [each.name[:12] for each in node.iterdir() if each.is_dir()] == ["run-00000004"]
        assert owner.reports == []

    owning("emulated", tmp_path, model_dir, scenario)


@pytest.mark.parametrize("faults", [{"fail_load": "RuntimeError: no"}, {"crash_on_load": True}])
def test_a_failed_load_restarts_the_engine_with_its_last_good_weights(
    faults: dict[str, object], tmp_path: Path, model_dir: str
) -> None:
    async def scenario(owner: Owner) -> None:
        await owner.go_over(1)
        assert owner.client is not None
        await owner.client.ask("/faults", json.dumps(faults).encode())
        assert await owner.fetch(2, owner.publish(2)) == ""
        step = asyncio.ensure_future(owner.greedy("lost", PROMPT, 1000))
        await asyncio.sleep(0.05)
        assert "were not loaded" in (await owner.install(2)).cause
        with pytest.raises(EngineUnreachable):
            await step
        client = await owner.until_ready(2)
        assert client.version == version(1) and await owner.serves(1)
        await owner.go_over(3)
        assert await owner.serves(3)

    owning("emulated", tmp_path, model_dir, scenario)


def test_an_engine_that_loads_for_long_is_not_stuck(tmp_path: Path, model_dir: str) -> None:
    async def scenario(owner: Owner) -> None:
        step = asyncio.ensure_future(owner.greedy("waits", PROMPT, 200))
        paused_s = await owner.go_over(1)
        assert paused_s >= 1.0 and owner.lost == []
        result = await step
        assert len(result.token_ids) == 200
        assert [span.policy_version for span in result.version_spans] == [0, 1]

    watch = Watch(start_timeout_s=CEILING_S, stall_s=0.2, canary_s=0.05)
    owning("emulated", tmp_path, model_dir, scenario, watch, faults={"load_delay_s": 1.0})
