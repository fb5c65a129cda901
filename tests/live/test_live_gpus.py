"""Which GPUs engines get: on one node, each its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st
from worlds.gpu_engine import CHOSEN_CONTEXT_TOKENS, CHOSEN_SLOTS
from worlds.live_agents import ToolAgent
from worlds.live_world import cluster, kill, run, worker_process

from heddle_dask.cli.rollout.command import rollout
from heddle_dask.cli.train.command import train
from heddle_dask.core.errors import BadInput
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.gpus import InstalledGpu, named_gpus, parsed_gpus, usable_gpus
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.vllm_command import VllmOptions
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.options import Budget, Engines, Patience
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.scheduler.gpu_seats import GpuSeats
from heddle_dask.live.wire.driver_messages import GetCapacity
from heddle_dask.live.wire.messages import SLOT_RESOURCE
from heddle_dask.live.wire.transport import ask_scheduler
from heddle_dask.live.wire.worker_messages import EngineWorkerReport, GpuHolder, TakeGpus
from heddle_dask.live.worker.rollout_worker import PLUGIN_NAME, RolloutWorker
from heddle_dask.preload import rollout_worker
from heddle_dask.records.reader import RunReader

GPU = "worlds.gpu_engine:GPU"
TESTS = Path(__file__).parents[1]


# -- what a process sees ---------------------------------------------------------------------------


def test_cuda_visible_devices_wins_over_what_is_installed() -> None:
    two = parsed_gpus("0, NVIDIA H100 80GB HBM3, 81559, 12\n1, NVIDIA H100 80GB HBM3, 81559, [N/A]\nnonsense\n")
    assert two == (
        InstalledGpu("0", "NVIDIA H100 80GB HBM3", 81559, 12),
        InstalledGpu("1", "NVIDIA H100 80GB HBM3", 81559, 0),
    )
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "5, GPU-7"}, lambda: two) == ("5", "GPU-7")
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": ""}, lambda: two) == ()
    assert usable_gpus({}, lambda: two) == ("0", "1")
    assert len(usable_gpus({}, lambda: None)) == 16
    assert named_gpus({}) is None


# -- the scheduler's register ----------------------------------------------------------------------


class Seated:
    """Seats, with what workers are told."""

    def __init__(self) -> None:
        self.ordered: list[tuple[str, list[str]]] = []
        self.refused: dict[str, str] = {}
        self.granted: dict[str, tuple[str, ...]] = {}
        self.seats = GpuSeats(self.host, self.refuse)

    async def host(self, worker: str, spec: Mapping[str, Any]) -> None:
        self.ordered.append((worker, spec["devices"]))

    def refuse(self, worker: str, reason: str) -> None:
        if reason or worker in self.refused:
            self.refused[worker] = reason

    def asks(self, worker: str, gpus: str, tp_degree: int = 1, node: str = "n", sharers: int = 1) -> None:
        wants = {"tp_degree": tp_degree, "engines_per_gpu": sharers}
        self.seats.worker_asks(worker, EngineWorkerReport(worker, node, 1, tuple(gpus.split()), wants))

    def takes(self, worker: str, gpus: str, count: int, holder: GpuHolder = "trainer") -> None:
        try:
            self.granted[worker] = self.seats.take(TakeGpus(worker, worker, "n", tuple(gpus.split()), count, holder))
        except BadInput as error:
            self.refused[worker] = str(error)


def seated(*steps: Any) -> Seated:
    made = Seated()

    async def body() -> None:
        for step in steps:
            step(made)
            await asyncio.sleep(0)

    asyncio.run(body())
    return made


def test_engines_of_a_node_get_gpus_of_their_own_and_other_nodes_have_others() -> None:
    made = seated(
        lambda s: s.asks("a", "4 5 6 7", 2),
        lambda s: s.asks("b", "4 5 6 7"),
        lambda s: s.asks("c", "4 5 6 7", node="m"),
        lambda s: s.asks("d", "4 5 6 7"),
    )
    assert made.ordered == [("a", ["4", "5"]), ("b", ["6"]), ("c", ["4"]), ("d", ["7"])]
    assert not made.refused


def test_a_worker_with_gpus_of_its_own_gets_those() -> None:
    made = seated(lambda s: s.asks("a", "1"), lambda s: s.asks("b", "0"), lambda s: s.asks("c", "0 1 2"))
    assert made.ordered == [("a", ["1"]), ("b", ["0"]), ("c", ["2"])]


def test_too_few_gpus_are_one_line_and_the_worker_gets_those_that_become_free() -> None:
    made = seated(lambda s: s.asks("a", "0 1"), lambda s: s.asks("b", "0 1", 2))
    assert made.ordered == [("a", ["0"])]
    assert made.refused["b"] == (
        "an engine of 2 GPU(s) on n finds 1 free: worker b sees 2 GPU(s) (0, 1), engines have the rest; start "
        "fewer engines, or set CUDA_VISIBLE_DEVICES"
    )
    made = seated(
        lambda s: s.asks("a", "0 1"),
        lambda s: s.asks("b", "0 1", 2),
        lambda s: s.seats.forget_worker("a"),
    )
    assert made.ordered[-1] == ("b", ["0", "1"])
    assert made.seats.taken == {("b", "engine"): ("0", "1")}
    assert not made.refused["b"], "what is over is no news for a driver that looks now"


EIGHT = "0 1 2 3 4 5 6 7"


def test_engines_trainer_and_services_of_a_node_have_gpus_of_their_own() -> None:
    engines = [lambda s, name=name: s.asks(name, EIGHT) for name in "abcd"]
    trainer_first = seated(lambda s: s.takes("t", EIGHT, 4), *engines)
    assert trainer_first.granted == {"t": ("0", "1", "2", "3")}
    assert [gpus for _, gpus in trainer_first.ordered] == [["4"], ["5"], ["6"], ["7"]]
    made = seated(
        *engines,
        lambda s: s.takes("t", EIGHT, 3),
        lambda s: s.takes("m", EIGHT, 2, "services"),
        lambda s: s.seats.give_back("t", "trainer"),
        lambda s: s.takes("m", EIGHT, 4, "services"),
    )
    assert made.granted == {"t": ("4", "5", "6"), "m": ("4", "5", "6", "7")}
    assert made.refused == {
        "m": "a host of model services of 2 GPU(s) on n finds 1 free: worker m sees 8 GPU(s) (0, 1, 2, 3, 4, 5, 6, 7), "
        "engines and trainers have the rest; start fewer engines, or set CUDA_VISIBLE_DEVICES"
    }


def test_a_trainer_that_ends_makes_room_for_the_engine_that_waits() -> None:
    made = seated(
        lambda s: s.takes("t", "0 1", 2), lambda s: s.asks("a", "0 1"), lambda s: s.seats.give_back("t", "trainer")
    )
    assert "a" in made.refused
    assert made.ordered == [("a", ["0"])]


def test_engines_share_a_gpu_only_with_their_like_and_fill_it_first() -> None:
    made = seated(
        lambda s: s.asks("a", "0 1 2", sharers=2),
        lambda s: s.asks("b", "0 1 2"),
        lambda s: s.asks("c", "0 1 2", sharers=2),
        lambda s: s.asks("d", "0 1 2", sharers=2),
        lambda s: s.takes("t", "0 1 2", 1),
    )
    assert made.ordered == [("a", ["0"]), ("b", ["1"]), ("c", ["0"]), ("d", ["2"])]
    assert "t" in made.refused, "the place beside an engine is no trainer's"


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 3), st.sampled_from([1, 2]), st.booleans()), max_size=12
    )
)
def test_no_gpu_has_more_than_it_may_have(asks: list[tuple[str, int, int, bool]]) -> None:
    made = seated(
        *(
            (lambda s, w=w, n=n: s.takes(w, "0 1 2 3", n))
            if takes
            else (lambda s, w=w, n=n, k=k: s.asks(w, "0 1 2 3", n, sharers=k))
            for w, n, k, takes in asks
        )
    )
    for gpu in "0123":
        sharers = [seat.sharers for seat in made.seats._seats.values() if gpu in seat.gpus]
        assert len(sharers) <= max(sharers, default=1) and len(set(sharers)) <= 1


def test_a_worker_that_asks_again_gives_its_gpus_back_first() -> None:
    made = seated(lambda s: s.asks("a", "0 1", 2), lambda s: s.asks("a", "0 1"), lambda s: s.asks("b", "0 1"))
    assert made.seats.taken == {("a", "engine"): ("0",), ("b", "engine"): ("1",)}
    cleared = seated(lambda s: s.asks("a", "0"), lambda s: s.seats.clear(), lambda s: s.asks("b", "0"))
    assert cleared.ordered == [("a", ["0"]), ("b", ["0"])]


def test_an_engine_is_reached_at_the_address_of_its_worker(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted: list[EngineSpec] = []

    class Hosted:
        def __init__(self, spec: EngineSpec, *args: Any, **options: Any) -> None:
            hosted.append(spec)

        def start(self) -> None:
            """Nothing."""

    monkeypatch.setattr("heddle_dask.live.worker.rollout_worker.EngineHost", Hosted)
    plugin = RolloutWorker(EngineSpec("emulated", model_dir, 4, 4096))
    worker: Any = SimpleNamespace(name="w", address="tls://203.0.113.7:4321", local_directory=str(tmp_path))
    plugin.worker = worker
    plugin._hosts = 0
    plugin._weights = SimpleNamespace(installed_for=lambda spec: None)
    plugin._start_engine(plugin.spec)
    plugin._start_engine(plugin.spec)
    assert [spec.kv_host for spec in hosted] == ["203.0.113.7"] * 2
    assert len({spec.seed for spec in hosted}) == 2, "with one seed, engines sample the same for one prompt"


def test_the_preload_of_a_standing_cluster_takes_what_engines_may_have(model_dir: str) -> None:
    added: list[RolloutWorker] = []

    async def plugin_add(plugin: RolloutWorker, catch_errors: bool) -> None:
        added.append(plugin)

    def preload(*arguments: str) -> None:
        asked = rollout_worker.dask_setup.make_context("preload", list(arguments))
        worker = SimpleNamespace(plugin_add=plugin_add)
        asyncio.run(rollout_worker.dask_setup.callback(worker, **asked.params))

    preload()
    assert not added
    options = '{"quantization": "fp8", "extra_args": ["--enforce-eager"], "logprobs": "processed"}'
    preload("--model", model_dir, "--tp-degree", "2", "--options", options, "--start-timeout", "1800")
    (plugin,) = added
    chosen = VllmOptions(quantization="fp8", extra_args=("--enforce-eager",), logprobs="processed")
    assert plugin.spec == EngineSpec("vllm", model_dir, tp_degree=2, options=chosen)
    assert plugin.watch is not None and plugin.watch.start_timeout_s == 1800
    with pytest.raises(BadInput, match="is no JSON"):
        preload("--model", model_dir, "--options", "fp8")


# -- on a cluster ----------------------------------------------------------------------------------


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scheduler and workers import the kind by its name."""
    paths = [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))


def gpu_engine(model: str, **chosen: Any) -> EngineSpec:
    options = EmulatedOptions(cost={"seconds_per_token": 0.001})
    return EngineSpec(GPU, model, slots=4, max_model_len=4096, options=options, **chosen)


async def devices(client: Client) -> list[tuple[str, ...]]:
    """The devices of every engine, by the names of their workers."""

    def own(dask_worker: Any) -> tuple[str, tuple[str, ...]] | None:
        plugin = dask_worker.plugins.get(PLUGIN_NAME)
        return None if plugin is None or plugin.worker is None else (dask_worker.name, plugin.spec.devices)

    answers = await client.run(own)  # type: ignore[misc]
    return [gpus for _, gpus in sorted(answer for answer in answers.values() if answer is not None)]


async def published_slots(client: Client) -> list[float]:
    """The resource ``LLM`` of every worker with an engine."""

    def own(dask_worker: Any) -> float | None:
        return dask_worker.state.total_resources.get(SLOT_RESOURCE)  # type: ignore[no-any-return]

    answers = await client.run(own)  # type: ignore[misc]
    return [slots for slots in answers.values() if slots is not None]


async def start_limits(client: Client) -> list[float]:
    """How long the engine of each worker may take to start."""

    def own(dask_worker: Any) -> float | None:
        plugin = dask_worker.plugins.get(PLUGIN_NAME)
        return None if plugin is None or plugin.worker is None else plugin.watch.start_timeout_s  # type: ignore[no-any-return]

    answers = await client.run(own)  # type: ignore[misc]
    return [limit_s for limit_s in answers.values() if limit_s is not None]


async def until_done(task: Task, ctx: Context) -> float:
    ctx.append("user", task.prompt)
    while not ctx.done:
        await ctx.generate(ignore_eos=True)
    return 1.0


@pytest.mark.cluster
@pytest.mark.usefixtures("importable")
def test_workers_of_one_node_use_different_gpus_also_after_one_has_died(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")

    async def body() -> None:
        async with cluster(engines=3) as (_, client):
            unlimited = replace(gpu_engine(model_dir), slots=None, max_model_len=None)
            patient = Patience(engines_s=1200.0)
            engines, out = Engines(spec=unlimited, count=3, patience=patient), tmp_path / "run.zarr"
            async with Rollout(client, env=until_done, model=model_dir, engines=engines, out=out) as rollout:
                batch = await rollout.run(["a", "b", "c", "d"])
                assert batch.counts == {"truncated": 4}, "each fills its context"
                # What the engines chose is what everything else goes by.
                assert {len(record.branches[0].token_ids) for record in batch} == {CHOSEN_CONTEXT_TOKENS}
                assert {len(record.steps) for record in batch} == {1}, "a step may take what the context leaves"
                limits = {name: RunReader(out).metadata[name] for name in ("context_tokens", "slots")}
                assert limits == {"context_tokens": CHOSEN_CONTEXT_TOKENS, "slots": 3 * CHOSEN_SLOTS}
                assert await published_slots(client) == [CHOSEN_SLOTS + 6] * 3
                assert await start_limits(client) == [1200.0] * 3, "the worker waits as long as the driver"
                assert sorted(await devices(client)) == [("2",), ("5",), ("7",)]
                kill(worker_process("rollout-1").pid)
                lost = False
                for _ in range(1200):
                    ready = len((await ask_scheduler(client, GetCapacity())).engines)
                    lost = lost or ready < 3
                    if lost and ready == 3:
                        break
                    await asyncio.sleep(0.05)
                assert sorted(await devices(client)) == [("2",), ("5",), ("7",)]
            named = Engines(spec=gpu_engine(model_dir, devices=("9",)), count=3)
            async with Rollout(client, env=ToolAgent(), model=model_dir, engines=named) as rollout:
                await rollout.run(1)
                assert await devices(client) == [("9",)] * 3, "devices that the spec names win"
            long = Budget(max_context_tokens=CHOSEN_CONTEXT_TOKENS + 1)
            refused = f"max_context_tokens is {CHOSEN_CONTEXT_TOKENS + 1}, and an engine takes {CHOSEN_CONTEXT_TOKENS}"
            own = replace(unlimited, max_model_len=CHOSEN_CONTEXT_TOKENS)
            with pytest.raises(BadInput, match=refused):
                Rollout(client, env=until_done, model=model_dir, engines=own, budget=long)
            with pytest.raises(BadInput, match=refused):
                await Rollout(client, env=until_done, model=model_dir, engines=engines, budget=long).run(["a"])
            with pytest.raises(BadInput, match="was made with contexts of up to 777 tokens, and this session has 500"):
                await Rollout(
                    client,
                    env=until_done,
                    model=model_dir,
                    engines=Engines(spec=replace(unlimited, max_model_len=500), count=3),
                    out=Output(out, "resume"),
                ).run(["a", "b", "c", "d"])
            pairs = Engines(spec=gpu_engine(model_dir, tp_degree=2), count=3)
            with pytest.raises(BadInput, match=r"an engine of 2 GPU\(s\) on .* finds 1 free") as raised:
                await Rollout(client, env=ToolAgent(), model=model_dir, engines=pairs).run(1)
            assert "\n" not in str(raised.value)

    run(body())


@pytest.mark.usefixtures("importable")
def test_more_engines_than_gpus_are_refused_before_anything_starts(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    asked = ("--engine", GPU, "--engines", "2", "--model", model_dir, "--out", str(tmp_path / "run.zarr"))
    argv = [sys.executable, "-c", "from heddle_dask.cli.main import main; main()", "rollout", *asked]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().endswith(
        "--engines 2 need 2 GPUs, this process sees 1 (3): use fewer engines, or set CUDA_VISIBLE_DEVICES"
    )


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            ("--trainer-ranks", "4"),
            "--engines 4 and 4 rank(s) of the trainer need 8 GPUs, this process sees 7 (0, 1, 2, 3, 4, 5, 6): use "
            "fewer engines, --trainer shares_gpus=true with a --gpu-memory-utilization that leaves room for the "
            "trainer, or set CUDA_VISIBLE_DEVICES",
        ),
        (
            ("--engines-per-gpu", "2", "--trainer-ranks", "6"),
            "--engines 4 with 2 on each GPU and 6 rank(s) of the trainer need 8 GPUs",
        ),
    ],
)
def test_engines_and_ranks_that_do_not_fit_are_one_line(
    more: tuple[str, ...], told: str, model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    asked = ("--engine", GPU, "--engines", "4", "--model", model_dir, "--out", str(tmp_path / "t"), *more)
    result = CliRunner().invoke(train, asked)
    assert isinstance(result.exception, BadInput) and told in str(result.exception)
    assert not (tmp_path / "t").exists()


def test_engines_that_use_no_gpu_share_none(model_dir: str, tmp_path: Path) -> None:
    asked = (
        "--engine",
        "emulated",
        "--engines-per-gpu",
        "2",
        "--model",
        model_dir,
        "--out",
        str(tmp_path / "run.zarr"),
    )
    result = CliRunner().invoke(rollout, asked)
    assert isinstance(result.exception, BadInput)
    assert str(result.exception) == "--engines-per-gpu: emulated engines use no GPUs on this machine: leave it out"
