"""KV moves between two engines, and what comes out when it does not: one suite for every kind of engine.

The emulated engines run always; vLLM (marked `vllm`, `slow`) where it is installed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path

import psutil
import pytest

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import (
    EngineRefused,
    GenerateRequest,
    KvHandle,
    KvTransferFailed,
    SamplingParams,
)
from heddle_dask.engines.emulated.options import EmulatedOptions, emulated_options
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.http_client import cluster_session

CHECKPOINT = Path(__file__).parents[2] / "pipelines" / "tiny_agent" / "checkpoint"
CEILING_S = 280.0
# NIXL's progress threads spin, a core per engine: with all cores busy, an import waits long for its turn.
LONG_LEASE_S = 180
METRIC = "vllm:kv_cache_usage_perc"
MAX_MODEL_LEN = 2048

EMULATED = EngineSpec(
    "emulated",
    "emulated-model",
    slots=4,
    max_model_len=MAX_MODEL_LEN,
    options=EmulatedOptions(
        cost={"fixed_s": 0.001, "prefill_token_s": 1e-4},
        emulation={"kv_bytes_per_token": 1000, "transfer_bytes_per_s": 1e9, "transfer_fixed_s": 0.001},
    ),
    kv_transfer=True,
)
VLLM = EngineSpec(
    "vllm",
    str(CHECKPOINT),
    slots=4,
    max_model_len=MAX_MODEL_LEN,
    dtype="float32",
    kv_transfer=True,
    engines_per_gpu=3,  # of which there may be one
)

Scenario = Callable[[EngineClient, EngineClient], Awaitable[None]]


def emulating(emulation: dict[str, float]) -> EngineSpec:
    """The emulated engine with other traits."""
    options = emulated_options(EMULATED.options)
    return replace(EMULATED, options=replace(options, emulation=emulation))


@dataclass(frozen=True)
class Pair:
    """Two running engines: where KV comes from, and where it goes."""

    source: EngineProcess
    target: EngineProcess

    @property
    def block_tokens(self) -> int:
        return 16 if self.source.spec.kind == "emulated" else 128

    def tell(self, scenario: Scenario) -> None:
        """Run one test's scenario, bounded, with clients of its own."""

        async def bounded() -> None:
            async with (
                EngineClient(self.source.address) as source,
                EngineClient(self.target.address) as target,
            ):
                await asyncio.wait_for(scenario(source, target), CEILING_S)

        asyncio.run(bounded())


def start(stack: ExitStack, directory: Path, *specs: EngineSpec) -> list[EngineProcess]:
    """Start engines, which end with the stack."""
    processes = []
    for index, spec in enumerate(specs):
        processes.append(EngineProcess(spec, directory / str(index)))
        stack.callback(lambda process=processes[-1]: asyncio.run(process.stop()))

    async def all_of_them() -> None:
        await asyncio.gather(*(process.start(240.0) for process in processes))

    asyncio.run(all_of_them())
    return processes


REAL = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
KINDS = ["emulated", pytest.param("vllm", marks=REAL)]


def spec_of(kind: str) -> EngineSpec:
    if kind == "vllm" and (util.find_spec("vllm") is None or util.find_spec("nixl") is None):
        pytest.skip("vLLM or NIXL is not installed")
    return EMULATED if kind == "emulated" else VLLM


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    spec = spec_of(request.param)
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("heddle_dask.engines.vllm_command.KV_LEASE_S", LONG_LEASE_S)
            pair = Pair(*start(stack, tmp_path_factory.mktemp("pair"), spec, spec))
        pair.tell(connect)
        yield pair


_count = 0


def name() -> str:
    global _count
    _count += 1
    return f"r{_count}"


def context(length: int) -> list[int]:
    """A context that no other test has."""
    rng = random.Random(f"{name()}:{length}")
    return [rng.randrange(40, 120) for _ in range(length)]


async def greedy(client: EngineClient, token_ids: list[int], count: int = 24) -> tuple[tuple[int, ...], int]:
    sampling = SamplingParams(count, 0.0, ignore_eos=True)
    result = await client.generate(GenerateRequest(name(), token_ids, sampling))
    return tuple(result.token_ids), result.cached_tokens


async def export(client: EngineClient, token_ids: list[int]) -> KvHandle:
    return await client.export_kv(name(), token_ids)


async def failure(client: EngineClient, token_ids: list[int], handle: KvHandle) -> str:
    with pytest.raises(KvTransferFailed) as caught:
        await client.import_kv(name(), token_ids, handle)
    assert "\n" not in str(caught.value)
    return caught.value.cause


async def connect(source: EngineClient, target: EngineClient) -> None:
    """Transfer once each way: the first connects the engines, and may outlast its lease on a busy machine."""
    for here, there in ((source, target), (target, source)):
        for tries_left in (3, 2, 1, 0):
            tokens = context(300)
            try:
                await there.import_kv(name(), tokens, await export(here, tokens))
                break
            except KvTransferFailed:
                if not tries_left:
                    raise


def test_only_loopback_is_listened_on(pair):
    """Both engines have talked by now: NIXL has opened all that it opens."""
    for engine in (pair.source, pair.target):
        leader = psutil.Process(engine.engine_pid)
        listening = [
            (process.name(), connection.laddr)
            for process in (leader, *leader.children(recursive=True))
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        outside = [
            (name, at) for name, at in listening if not ipaddress.ip_address(at.ip.partition("%")[0]).is_loopback
        ]
        assert not outside, listening
        if engine.spec.kind == "vllm":
            ports = {at.port for _, at in listening}
            assert len(ports) >= 2, "NIXL's side channel, and UCX"


@pytest.mark.parametrize("length", [1, 100, 128, 129, 1500])
def test_the_target_goes_on_as_the_source_would(pair, length):
    async def scenario(source: EngineClient, target: EngineClient) -> None:
        tokens = context(length)
        expected, _ = await greedy(source, tokens)
        handle = await export(source, tokens)
        assert handle.tokens == length
        done = await target.import_kv(name(), tokens, handle)
        full = (length - 1) // pair.block_tokens * pair.block_tokens
        assert done.seconds > 0
        assert done.cached_tokens == length
        got, cached = await greedy(target, tokens)
        assert got == expected
        assert cached == full

    pair.tell(scenario)


def test_a_trajectory_that_moves_back_and_forth_gets_the_tokens_of_one_that_stays(pair):
    async def scenario(source: EngineClient, target: EngineClient) -> None:
        tokens = context(400)
        stayed, _ = await greedy(source, tokens, 120)
        moved, _ = await greedy(source, tokens, 40)
        for here, there in ((source, target), (target, source)):
            whole = [*tokens, *moved]
            await there.import_kv(name(), whole, await export(here, whole))
            part, _ = await greedy(there, whole, 40)
            moved += part
        assert moved == stayed

    pair.tell(scenario)


def test_warming_is_recomputing(pair):
    async def scenario(source: EngineClient, target: EngineClient) -> None:
        tokens = context(500)
        expected, _ = await greedy(source, tokens)
        first = await target.warm(tokens, name())
        second = await target.warm(tokens, name())
        assert first.cached_tokens == 0
        assert second.cached_tokens == 499 // pair.block_tokens * pair.block_tokens
        assert (await greedy(target, tokens))[0] == expected

    pair.tell(scenario)


def test_a_handle_travels_as_json(pair):
    async def scenario(source: EngineClient, target: EngineClient) -> None:
        tokens = context(300)
        handle = await export(source, tokens)
        again = KvHandle.from_mapping(json.loads(json.dumps(handle.to_mapping())), handle.asked_s)
        assert again == handle
        await target.import_kv(name(), tokens, again)

    pair.tell(scenario)


def test_kv_of_other_weights_is_refused_unless_kv_is_kept(pair):
    async def scenario(source: EngineClient, target: EngineClient) -> None:
        tokens = context(300)
        handle = await export(source, tokens)
        assert handle.version == "0"
        await target.install_weights(str(CHECKPOINT), PolicyVersion("run", 1))
        assert await failure(target, tokens, handle) == "version"
        await target.install_weights(str(CHECKPOINT), PolicyVersion("run", 2), keep_kv=True)
        assert (await target.import_kv(name(), tokens, handle)).cached_tokens == 300

    pair.tell(scenario)


def test_an_engine_changes_its_weights_when_the_kv_that_another_one_fetches_is_gone(pair):
    async def scenario(source: EngineClient, target: EngineClient) -> None:
        tokens = context(300)
        handle = await export(source, tokens)
        update = asyncio.ensure_future(source.install_weights(str(CHECKPOINT), PolicyVersion("run", 1)))
        await asyncio.sleep(1.0)
        assert not update.done()
        await target.import_kv(name(), tokens, handle)
        done = await update
        # The emulated engine pauses at once and then cannot drop the KV; vLLM's pause itself waits.
        assert done.attempts > 1 or done.paused_s > 0.5
        assert source.version == PolicyVersion("run", 1)
        got, cached = await greedy(source, tokens)
        assert got == (await greedy(target, tokens))[0] and cached == 0

    pair.tell(scenario)


def test_misuse_is_refused_before_it_can_do_harm(pair):
    async def scenario(source: EngineClient, target: EngineClient) -> None:
        tokens = context(300)
        handle = await export(source, tokens)
        assert await failure(target, context(300), handle) == "mismatch"
        assert await failure(target, [*tokens, 50], handle) == "mismatch"
        other_blocks = replace(handle, block_tokens=handle.block_tokens // 2)
        assert await failure(target, tokens, other_blocks) == "mismatch"
        other_degree = replace(handle, tp_degree=handle.tp_degree + 1)
        assert await failure(target, tokens, other_degree) == "mismatch"
        late = replace(handle, asked_s=handle.asked_s - handle.valid_s - 1)
        assert await failure(target, tokens, late) == "expired"
        await target.import_kv(name(), tokens, handle)
        assert await failure(target, tokens, handle) == "used"
        with pytest.raises(EngineRefused):
            await export(source, context(MAX_MODEL_LEN))
        assert await source.healthy() and await target.healthy()

    pair.tell(scenario)


def test_an_export_on_a_cold_engine_computes_first(pair):
    async def scenario(source: EngineClient, target: EngineClient) -> None:
        tokens = context(600)
        handle = await export(source, tokens)
        await target.import_kv(name(), tokens, handle)
        assert (await greedy(target, tokens))[0] == (await greedy(source, tokens))[0]

    pair.tell(scenario)


def test_exports_and_imports_among_other_work(pair):
    async def scenario(source: EngineClient, target: EngineClient) -> None:
        async def move(tokens: list[int]) -> None:
            expected, _ = await greedy(source, tokens, 12)
            handle = await export(source, tokens)
            await target.import_kv(name(), tokens, handle)
            assert (await greedy(target, tokens, 12))[0] == expected

        await asyncio.gather(*(move(context(130 + 90 * index)) for index in range(6)))

    pair.tell(scenario)


def test_a_move_goes_before_the_steps_that_wait_in_a_full_engine(pair):
    """Its trajectory waits for it, and would for as long as the engine has anything more urgent than 0."""

    async def scenario(source: EngineClient, target: EngineClient) -> None:
        async def behind(client: EngineClient, *moves: Callable[[], Awaitable[object]]) -> None:
            moved = asyncio.Event()

            async def steps() -> None:
                sampling = SamplingParams(50, 0.0, ignore_eos=True)
                while not moved.is_set():
                    await client.generate(GenerateRequest(name(), context(60), sampling, priority=-100_000))

            # Four steps run at a time: eight always wait, until the moves have found slots.
            load = [asyncio.create_task(steps()) for _ in range(4 + 8)]
            await asyncio.sleep(0.1)
            await asyncio.gather(*(move() for move in moves))
            moved.set()
            await asyncio.gather(*load)

        tokens = context(300)
        handles: list[KvHandle] = []

        async def exported() -> None:
            handles.append(await export(source, tokens))

        await behind(source, exported)
        await behind(
            target,
            lambda: target.warm(context(200), name()),
            lambda: target.import_kv(name(), tokens, handles[0]),
        )

    pair.tell(scenario)


@pytest.mark.parametrize("attempt", range(2))
def test_an_interrupted_step_goes_on_with_the_tokens_of_an_uninterrupted_one(pair, attempt):
    """float32 and temperature 0: preemption must not change what a trajectory says."""

    async def scenario(source: EngineClient, target: EngineClient) -> None:
        tokens = context(200 + 61 * attempt)
        length = 300
        whole, _ = await greedy(source, tokens, length)
        for tries in range(24):
            sampling = SamplingParams(length, 0.0, ignore_eos=True)
            request = GenerateRequest(name(), tokens, sampling)
            running = asyncio.ensure_future(source.generate(request))
            # How far a step is after a while is the machine's affair: from 0.04 to 0.7 s.
            await asyncio.sleep(0.04 * 1.5 ** ((attempt + tries) % 8))
            await source.abort([request.request_id])
            part = (await running).token_ids
            if 0 < len(part) < length:
                break
        else:
            raise AssertionError("no step was caught midway")
        assert part == whole[: len(part)]
        rest, cached = await greedy(source, [*tokens, *part], length - len(part))
        assert (*part, *rest) == whole
        assert cached >= (len(tokens) - 1) // pair.block_tokens * pair.block_tokens

    pair.tell(scenario)


# ------------------------------------------------------------------ engines that die


def test_a_source_that_died_fails_the_import_and_the_target_recomputes(pair):
    """Last of those on this pair: neither engine comes back."""

    async def scenario(source: EngineClient, target: EngineClient) -> None:
        first, second, third = context(300), context(400), context(350)
        await target.import_kv(name(), first, await export(source, first))
        handle, other = await export(source, second), await export(source, third)
        expected, _ = await greedy(source, second)
        os.kill(pair.source.engine_pid, signal.SIGKILL)
        await pair.source.wait()
        assert await failure(target, second, handle) in ("source", "expired")
        assert await target.healthy()
        warmed = await target.warm(second, name())
        assert warmed.cached_tokens == 0
        assert (await greedy(target, second))[0] == expected
        with pytest.raises(KvTransferFailed) as caught:
            await export(source, first)
        assert caught.value.cause == "source"
        os.kill(pair.target.engine_pid, signal.SIGKILL)
        await pair.target.wait()
        assert await failure(target, third, other) == "target"

    pair.tell(scenario)


# ------------------------------------------------------------------ what only an emulated engine does on request


@pytest.fixture
def emulated(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(*start(stack, tmp_path, EMULATED, EMULATED))


async def set_faults(engine: EngineProcess, **faults: object) -> None:
    async with (
        cluster_session(engine.address.socket) as session,
        session.post(f"{engine.address.url}/faults", json=faults) as response,
    ):
        assert response.status == 200


@pytest.mark.parametrize("fault", ["kv_source_lost", "kv_blocks_expired"])
def test_faults_of_the_source_fail_the_import(emulated, fault):
    async def scenario(source: EngineClient, target: EngineClient) -> None:
        tokens = context(300)
        await set_faults(emulated.source, **{fault: True})
        handle = await export(source, tokens)
        assert await failure(target, tokens, handle) == "source"
        assert (await target.warm(tokens, name())).cached_tokens == 0
        await set_faults(emulated.source)
        other = context(300)
        await target.import_kv(name(), other, await export(source, other))

    emulated.tell(scenario)


def test_a_transfer_takes_the_time_of_its_bytes(tmp_path):
    slow = emulating({"kv_bytes_per_token": 1000, "transfer_bytes_per_s": 2.5e5})
    with ExitStack() as stack:
        pair = Pair(*start(stack, tmp_path, slow, slow))

        async def scenario(source: EngineClient, target: EngineClient) -> None:
            tokens = context(500)
            handle = await export(source, tokens)
            assert handle.params["kv_bytes"] == 500_000
            whole = await target.import_kv(name(), tokens, handle)
            assert whole.seconds >= 2.0
            # What the target has already is not sent again.
            longer = [*tokens, *context(32)]
            handle = await export(source, longer)
            done = await target.import_kv(name(), longer, handle)
            assert 0.12 <= done.seconds < whole.seconds

        pair.tell(scenario)


def test_blocks_are_let_go_when_the_lease_ends_and_an_import_waits_no_longer(tmp_path):
    brief = {"kv_bytes_per_token": 1000, "transfer_bytes_per_s": 1e4, "kv_lease_s": 0.6}
    spec = emulating({**brief, "kv_capacity_tokens": MAX_MODEL_LEN + 16})
    with ExitStack() as stack:
        pair = Pair(*start(stack, tmp_path, spec, spec))

        async def scenario(source: EngineClient, target: EngineClient) -> None:
            tokens = context(1500)
            handle = await export(source, tokens)
            assert handle.expires_s - time.monotonic() < 0.6
            # The transfer would take 150 s.
            assert await failure(target, tokens, handle) == "expired"
            assert (await target.warm(tokens, name())).cached_tokens == 0
            await asyncio.sleep(0.7)
            # With blocks still pinned there would be no room for this.
            await greedy(source, context(1900), 2)
            stale = replace(handle, asked_s=time.monotonic(), valid_s=60.0)
            async with EngineClient(pair.target.address) as fresh:
                assert await failure(fresh, tokens, stale) == "source"

        pair.tell(scenario)


async def check_blocks_are_let_go(engine: EngineClient) -> None:
    """The lease of real blocks ends: nothing uses them, and an import is refused. The source alone shows both.

    Called where a vLLM engine with a short lease runs (tests/live/test_engine_host.py).
    """

    async def kv_use() -> float:
        async with (
            cluster_session(engine.address.socket) as session,
            session.get(f"{engine.address.url}/metrics") as said,
        ):
            lines = (await said.text()).splitlines()
        return float(next(line for line in lines if line.startswith(METRIC)).split()[-1])

    tokens = context(1500)
    expected, _ = await greedy(engine, tokens)
    handle = await export(engine, tokens)
    await greedy(engine, context(20), 2)  # counts are written with each iteration
    assert await kv_use() > 0
    await asyncio.sleep(max(0.0, handle.expires_s - time.monotonic()))
    assert await failure(engine, tokens, handle) == "expired"
    while await kv_use() > 0:
        await asyncio.sleep(0.5)
        await greedy(engine, context(20), 2)
    assert (await greedy(engine, tokens))[0] == expected


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_jump_of_the_wall_clock_changes_no_lease(tmp_path, monkeypatch, jump_s):
    """Set back, an expired handle would seem good, and its blocks, used for others by then, would be read."""
    spec = emulating({"kv_lease_s": 3.0})
    now = time.time
    with ExitStack() as stack:
        pair = Pair(*start(stack, tmp_path, spec, spec))

        async def scenario(source: EngineClient, target: EngineClient) -> None:
            tokens, other = context(300), context(310)
            handle, late = await export(source, tokens), await export(source, other)
            monkeypatch.setattr(time, "time", lambda: now() + jump_s)
            travelled = KvHandle.from_mapping(json.loads(json.dumps(handle.to_mapping())), handle.asked_s)
            await target.import_kv(name(), tokens, travelled)
            await asyncio.sleep(max(0.0, late.asked_s + 2.0 - time.monotonic()))
            assert await failure(target, other, late) == "expired"

        pair.tell(scenario)


def test_the_way_of_a_handle_counts_against_its_lease():
    """A target counts from when it asked: a handle that took longer than its lease is not good on arrival."""
    handle = KvHandle("e", 1, "d", 16, 1, {}, valid_s=2.0, asked_s=50.0)
    told = handle.to_mapping()
    assert "asked_s" not in told, "another process has another clock"
    assert KvHandle.from_mapping(told, asked_s=900.0).expires_s == 902.0


def test_an_engine_that_was_started_again_does_not_know_old_handles(emulated, tmp_path):
    async def scenario(source: EngineClient, target: EngineClient) -> None:
        tokens = context(200)
        handle = await export(source, tokens)
        os.kill(emulated.source.engine_pid, signal.SIGKILL)
        await emulated.source.wait()
        again = EngineProcess(EMULATED, tmp_path / "again")
        await again.start(60.0)
        try:
            moved = replace(handle, params={**handle.params, "remote_host": again.address.socket})
            assert await failure(target, tokens, moved) == "source"
            assert "this engine is emulated-" in again.log_tail()[-1]
        finally:
            await again.stop()

    emulated.tell(scenario)
