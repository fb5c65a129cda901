"""The weights of a supervised engine: fetched and installed while it works, kept when it dies, refused when wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from worlds.weight_builders import perturbed
from worlds.weight_owner import CEILING_S, OTHER, PROMPT, Owner, assert_same, owning, version

from heddle_dask.core.commands import FetchWeights, InstallWeights
from heddle_dask.core.events import WeightsFetched, WeightsInstalled
from heddle_dask.core.ids import EngineId, PolicyVersion
from heddle_dask.engines.contract import EngineUnreachable, VersionSpan
from heddle_dask.engines.node_weights import FetchStopped, NodeWeightsDirectory
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.live.wire.envelopes import Report
from heddle_dask.live.worker import weight_keeper
from heddle_dask.live.worker.engine_host import Watch
from heddle_dask.live.worker.weight_keeper import WeightKeeper
from heddle_dask.weights.model_directory import model_facts
from heddle_dask.weights.store import WeightStore


def test_a_fetch_that_does_not_end_has_failed_and_its_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_keeper, "FETCH_S", 0.05)
    reports: list[Report] = []
    stops: list[threading.Event] = []

    def hangs(
        copies: object, uri: str, wanted: PolicyVersion, current: object, stop: threading.Event, **_: bool
    ) -> None:
        stops.append(stop)
        assert stop.wait(CEILING_S)
        raise FetchStopped("the fetch was stopped")

    monkeypatch.setattr(NodeWeightsDirectory, "fetch", hangs)

    async def body() -> None:
        owner = Mock(engine_id="e")
        owner.spec = EngineSpec("emulated", "model", slots=1, max_model_len=100)
        keeper = WeightKeeper(owner, Path("nowhere"), reports.append, Mock())
        await keeper._fetch(FetchWeights(EngineId("e"), version(3), "there"), threading.Event())

    asyncio.run(body())
    (event,) = (report.event for report in reports)
    assert isinstance(event, WeightsFetched)
    assert event.cause == f"weights {version(3)} did not come from there within 0 s"
    assert stops[0].is_set()


# -- scenarios; tests/pipelines/test_grpo_vllm.py has those of `REAL_SCENARIOS` on vLLM ---------------------------


async def goes_on_as_if_stopped(owner: Owner) -> None:
    across = await owner.across(keep_kv=False)
    assert (await owner.greedy("other", OTHER, 2)).cached_tokens == 0, "no prefix of the old weights is left"

    # A run that is stopped at that token and started again, with nothing cached, samples the same.
    await owner.drop_kv()
    again = await owner.greedy("again", across.until_cut, across.tokens_after)
    assert again.cached_tokens == 0
    assert_same(again, across.after)


async def comes_back_when_it_is_killed_while_it_installs(owner: Owner) -> None:
    """In a new process, with the version before, which it then has from files and had loaded in place before."""
    number, before = await owner.published_next(), await owner.greedy("before", PROMPT, 40)
    assert owner.client is not None and owner.host._process is not None
    client, process, incarnations = owner.client, owner.host._process, owner.incarnations
    owner.weights.install(InstallWeights(EngineId(owner.engine_id), version(number)))
    while not client.is_updating:
        await asyncio.sleep(0)
    os.kill(process.engine_pid, signal.SIGKILL)
    told = await owner.report()
    assert isinstance(told, WeightsInstalled) and told.cause != ""
    client = await owner.until_ready(incarnations + 1)
    assert client.version == version(number - 1) and await owner.serves(number - 1)
    assert_same(await owner.greedy("restarted", PROMPT, 40), before)


async def keeps_kv_where_that_is_asked_for(owner: Owner) -> None:
    """Pausing vLLM in mode `keep` drops no KV by itself: that is what the reset of the prefix cache is for."""
    across = await owner.across(keep_kv=True)
    assert (await owner.greedy("other", OTHER, 2)).cached_tokens > 0
    await owner.drop_kv()
    again = await owner.greedy("again", across.until_cut, across.tokens_after)
    if owner.spec.kind == "vllm":
        # The first token after the switch has the same context, whatever follows.
        assert abs(again.logprobs[0] - across.after.logprobs[0]) > 1e-3

    many = [asyncio.ensure_future(owner.greedy(f"many-{each}", [*PROMPT, each], 300)) for each in range(8)]
    await owner.until_generating()
    number = await owner.published_next()
    report = await owner.install(number, keep_kv=True)
    print(f"{owner.spec.kind}, 8 steps, KV kept: paused {1000 * report.paused_s:.0f} ms")
    assert report.cause == "" and {len((await step).token_ids) for step in many} == {300}
    assert await owner.serves(number)


async def refuses_wrong_weights(owner: Owner) -> None:
    """Each time with a step in flight: it is not paused, nothing is lost, and the logprobs stay as they were."""
    assert owner.client is not None
    asked: list[str] = []
    ask = owner.client.ask

    async def noting(path: str, body: bytes | None = None, timeout_s: float | None = None) -> bytes:
        asked.append(path)
        return await ask(path, body, timeout_s)

    owner.client.ask = noting  # type: ignore[method-assign]
    number = owner.client.version.number
    await owner.greedy("first", PROMPT, 40)  # the prompt is cached from now on, for all of them
    before = await owner.greedy("before", PROMPT, 40)
    lost, incarnations = list(owner.lost), owner.incarnations

    async def refused(told: str, wrong: int, uri: str) -> None:
        step = asyncio.ensure_future(owner.greedy("beside", PROMPT, 40))
        await owner.until_generating()
        assert told in await owner.fetch(wrong, uri)
        assert (await owner.install(wrong)).cause == f"weights {version(wrong)} are not at hand"
        for result in (await step, await owner.greedy("after", PROMPT, 40)):
            assert_same(result, before)
            assert result.version_spans == (VersionSpan(number, 0, 40, "run"),)

    good, new = owner.publish(number + 1), number + 1
    bucket = sorted(Path(good).parent.glob("*.safetensors"))[1]
    content, manifest = bucket.read_bytes(), Path(good).read_text()
    bucket.unlink()
    await refused("is missing", new, good)
    bucket.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    await refused("is corrupt", new, good)
    bucket.write_bytes(content)
    Path(good).write_text(manifest[:-20])
    await refused("manifest", new, good)
    Path(good).write_text(manifest)
    model = owner.spec.model
    tensors, facts = perturbed(model, 1), model_facts(model)
    for told, which, of_model, name in (
        ("were asked for", PolicyVersion("another-run", new), facts, "run"),
        ("of another shape", version(new), replace(facts, config_digest="other"), "shape"),
        ("another tokenizer", version(new), replace(facts, tokenizer_digest="other"), "tokenizer"),
    ):
        foreign = WeightStore(str(owner.directory / "foreign" / name)).write(which, tensors, of_model)
        await refused(told, new, foreign)
    part = WeightStore(str(owner.directory / "part")).write(version(new), tensors[1:], facts)
    await refused("lack tensors", new, part)
    await refused("not newer", number - 1, owner.publish(number - 1))
    assert not asked, "nothing was asked of the engine, above all no pause"
    assert (owner.lost, owner.incarnations) == (lost, incarnations)

    # The same version as it was published is taken.
    assert await owner.fetch(new, good) == "" and (await owner.install(new)).cause == ""
    assert await owner.serves(new)


async def restarts_after_a_failed_load(owner: Owner) -> None:
    """A file is damaged between its verification and the load: the newest good version serves."""
    assert owner.client is not None
    number, incarnations = owner.client.version.number, owner.incarnations
    before = await owner.greedy("before", PROMPT, 40)
    new = await owner.published_next()
    (copy,) = (owner.directory / "node").glob(f"run-{new:08d}-*/")
    damaged = sorted(copy.glob("*.safetensors"))[1]
    nbytes = damaged.stat().st_size
    damaged.unlink()  # a link: the store's bucket stays as it is
    damaged.write_bytes(b"\xff" * nbytes)
    step = asyncio.ensure_future(owner.greedy("lost", PROMPT, 1500))
    await owner.until_generating()
    assert "were not loaded" in (await owner.install(new)).cause
    with pytest.raises(EngineUnreachable):
        await step
    client = await owner.until_ready(incarnations + 1)
    assert client.version == version(number) and await owner.serves(number)
    assert_same(await owner.greedy("after", PROMPT, 40), before)
    assert len(owner.lost) == owner.incarnations - 1 and "were not loaded" in owner.lost[-1]

    # What is damaged is found now, and brought again.
    assert await owner.fetch(new, owner.publish(new)) == "" and (await owner.install(new)).cause == ""
    assert await owner.serves(new)


REAL_SCENARIOS = (
    goes_on_as_if_stopped,
    keeps_kv_where_that_is_asked_for,
    refuses_wrong_weights,
    restarts_after_a_failed_load,
)
# A real engine is started again once only: after the failed load.
SCENARIOS = (goes_on_as_if_stopped, comes_back_when_it_is_killed_while_it_installs, *REAL_SCENARIOS[1:])


def test_weights_go_on_are_refused_and_restart_an_engine(tmp_path: Path, model_dir: str) -> None:
    async def all_of_them(owner: Owner) -> None:
        await owner.go_over(1)
        for scenario in SCENARIOS:
            await scenario(owner)

    owning(tmp_path, model_dir, all_of_them)


def test_only_the_newest_order_is_answered_and_old_weights_are_removed(tmp_path: Path, model_dir: str) -> None:
    async def scenario(owner: Owner) -> None:
        uris = {number: owner.publish(number) for number in (1, 2, 3)}
        for number, uri in uris.items():
            owner.weights.fetch(FetchWeights(EngineId(owner.engine_id), version(number), uri))
        report = await owner.report()
        assert isinstance(report, WeightsFetched) and (report.version, report.cause) == (version(3), "")
        assert (await owner.install(3)).cause == ""
        await owner.go_over(4)
        node = tmp_path / "node"
        while len([each for each in node.iterdir() if each.is_dir()]) > 1:
            await asyncio.sleep(0.02)
        assert [each.name[:12] for each in node.iterdir() if each.is_dir()] == ["run-00000004"]
        assert owner.reports == []

    owning(tmp_path, model_dir, scenario)


def test_an_engine_that_a_load_kills_comes_back_with_its_last_good_weights(tmp_path: Path, model_dir: str) -> None:
    async def scenario(owner: Owner) -> None:
        await owner.go_over(1)
        assert owner.client is not None
        await owner.client.ask("/faults", json.dumps({"crash_on_load": True}).encode())
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

    owning(tmp_path, model_dir, scenario)


def test_weights_that_no_engine_can_load_do_not_restart_it_for_ever(tmp_path: Path, model_dir: str) -> None:
    async def scenario(owner: Owner) -> None:
        uri = owner.publish(1)
        for incarnation in (1, 2):
            await owner.until_ready(incarnation)
            assert await owner.fetch(1, uri) == ""
            assert "were not loaded" in (await owner.install(1)).cause
            client = await owner.until_ready(incarnation + 1)
            assert client.version == PolicyVersion()
        assert "RuntimeError: no; tried 2 times" in await owner.fetch(1, uri)
        assert owner.incarnations == 3 and len((await owner.greedy("serves", PROMPT, 2)).token_ids) == 2
        assert await owner.fetch(2, owner.publish(2)) == "", "others may be good"

    owning(tmp_path, model_dir, scenario, faults={"fail_load": "RuntimeError: no"})


def test_an_engine_that_loads_for_long_is_not_stuck(tmp_path: Path, model_dir: str) -> None:
    async def scenario(owner: Owner) -> None:
        assert await owner.fetch(1, owner.publish(1)) == ""
        step = asyncio.ensure_future(owner.greedy("waits", PROMPT, 1000))
        await owner.until_generating()
        report = await owner.install(1)
        assert report.cause == "" and report.paused_s >= 1.0 and owner.lost == []
        result = await step
        assert len(result.token_ids) == 1000
        assert [span.policy_version for span in result.version_spans] == [0, 1]

    watch = Watch(start_timeout_s=CEILING_S, stall_s=0.2, canary_s=0.05)
    owning(tmp_path, model_dir, scenario, watch, faults={"load_delay_s": 1.0})
