"""TP degrees of live engines: assignments as lists, orders to workers, and clusters whose engines change."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.live_agents import ToolAgent
from worlds.live_world import cluster, control_lines, descendants, kill, run, until
from worlds.record_builders import plain_trajectory
from worlds.shared_cluster import shared_cluster

from heddle_dask.cli.rollout.parsed_options import parsed_cost, parsed_degrees
from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import GroupId, TrajectoryId
from heddle_dask.core.journal_codec import replay
from heddle_dask.core.nouns import FinishedWork, TrajectorySpec
from heddle_dask.cost.engine_cost import cost_from_mapping
from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.emulated.options import EmulatedOptions, emulated_options
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.vllm_command import vllm_command
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.driver.options import Engines, Patience, checked_degrees
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.driver.session.degrees import EngineDegrees
from heddle_dask.live.driver.session.tp_degree_specs import TpDegreeSpecs, cost_at
from heddle_dask.live.scheduler.degree_planning import forecast
from heddle_dask.live.scheduler.deployment import EngineDeployment, Order
from heddle_dask.live.wire.driver_messages import DeployedEngines, GetCapacity, GetDeployedEngines
from heddle_dask.live.wire.transport import ask_scheduler
from heddle_dask.live.wire.worker_messages import EngineWorkerReport
from heddle_dask.live.worker.engine_host import visible_gpus
from heddle_dask.predictors.features import Finished
from heddle_dask.predictors.known import KnownWork, Oracle
from heddle_dask.predictors.learned import LearnedPredictor
from heddle_dask.records.store import RunReader
from heddle_dask.strategies.presets import strategies_of_run
from heddle_dask.strategies.tp_degrees.assignment import (
    EngineAssignment,
    EngineWorker,
    assign_engines,
    nodes_of,
)

PROFILE = {"profile": "qwen3-8b-h100"}
ENGINE = "heddle_dask.engines.emulated"
CLIENT: Any = None  # the constructor only keeps it


def test_observations_of_a_forked_trajectory_are_counted_in_each_branch(model_dir: str) -> None:
    """Two steps of 4 tokens with a tool's 4 between them, and a fork of the first context with the same again."""
    one = plain_trajectory(0, steps=2, tokens=4)
    forked = replace(
        one,
        branches=(*one.branches, *one.branches),
        steps=(*one.steps, *(replace(step, branch=1) for step in one.steps)),
    )
    spec = EngineSpec("emulated", model_dir)
    for record, branches in ((one, 1), (forked, 2)):
        degrees = EngineDegrees(
            CLIENT,
            TpDegreeSpecs(spec, None),
            engines=None,
            patience=Patience(),
            max_context_tokens=4096,
            seed=0,
            told_apart=False,
            note=lambda line: None,
        )
        degrees.finished(record)
        assert degrees._finished == [FinishedWork(8 * branches, 4 * branches, 0.75 * 2)]


def four(node: str = "n") -> list[EngineWorker]:
    return [EngineWorker(f"{node}-{i}", node) for i in range(4)]


def by_worker(engines: Sequence[EngineAssignment]) -> dict[str, tuple[int, tuple[str, ...]]]:
    return {one.worker: (one.tp_degree, one.gpus) for one in engines}


# -- assignments -----------------------------------------------------------------------------------


def test_the_gpus_of_a_node_are_shared_and_a_larger_engine_leaves_a_worker_idle() -> None:
    nodes = nodes_of(four())
    ones = assign_engines(nodes, [1, 1, 1, 1])
    assert by_worker(ones) == {f"n-{i}": (1, (str(i),)) for i in range(4)}
    mixed = assign_engines(nodes, [1, 2, 1], ones)
    assert by_worker(mixed) == {"n-0": (2, ("0", "1")), "n-2": (1, ("2",)), "n-3": (1, ("3",))}
    back = assign_engines(nodes, [1, 1, 1, 1], mixed)
    assert by_worker(back) == by_worker(ones)
    assert [one for one in back if one in mixed] == [
        EngineAssignment("n-2", 1, ("2",)),
        EngineAssignment("n-3", 1, ("3",)),
    ]


def test_workers_that_see_the_same_gpus_share_them_and_names_are_kept() -> None:
    each = [EngineWorker(f"w{i}", "n", gpus=(name,)) for i, name in enumerate(("5", "GPU-a", "2"))]
    assert nodes_of(each)[0].gpus == ("5", "GPU-a", "2")
    same = [EngineWorker(f"w{i}", "n", gpus=("4", "5")) for i in range(3)]
    assert by_worker(assign_engines(nodes_of(same), [1, 1])) == {"w0": (1, ("4",)), "w1": (1, ("5",))}
    assert by_worker(assign_engines(nodes_of(same), [2])) == {"w0": (2, ("4", "5"))}


def test_workers_are_in_the_order_of_their_numbers() -> None:
    workers = [EngineWorker(f"rollout-{i}", "n") for i in (10, 2, 1)]
    assert nodes_of(workers)[0].workers == ("rollout-1", "rollout-2", "rollout-10")


def test_gpus_of_others_are_left_to_them_and_numbers_go_on_behind_them() -> None:
    def taken(node: str) -> set[str]:
        return {"0"} if node == "n" else set()

    trained, other = nodes_of([*four()[:2], EngineWorker("m-0", "node-2", 2)], taken)
    assert (trained.gpus, trained.brought_by, trained.capacity.gpus) == (("1", "2"), ("n-0", "n-1"), 2)
    assert other.gpus == ("0", "1")
    (named,) = nodes_of([EngineWorker(f"w{i}", "n", gpus=("0", "3")) for i in range(2)], taken)
    assert (named.gpus, named.capacity.gpus) == (("3",), 1)


def test_a_node_where_only_some_say_what_they_see_is_refused() -> None:
    with pytest.raises(BadInput, match="worker b on node n does not say which GPUs it sees, worker a does"):
        nodes_of([EngineWorker("a", "n", gpus=("0",)), EngineWorker("b", "n")])


def test_an_engine_stays_on_the_node_where_it_runs() -> None:
    nodes = nodes_of([*four("a"), *four("b")])
    now = assign_engines(nodes, [4, 1, 1, 1, 1])
    assert {one.worker[0] for one in now if one.tp_degree == 1} == {"b"}
    changed = assign_engines(nodes, [2, 2, 1, 1, 1, 1], now)
    assert [s for s in changed if s.tp_degree == 1] == [s for s in now if s.tp_degree == 1]


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (
            [2, 2, 1],
            "TP degrees 2,2,1 need 5 GPUs and 3 workers, .* engine of TP degree 1: the nodes have 4 GPUs",
        ),
        ([8], "no node has room left for an engine of TP degree 8"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(degrees: list[int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        assign_engines(nodes_of(four()), degrees)


def test_more_engines_than_workers_are_refused() -> None:
    with pytest.raises(BadInput, match="4 GPUs and 1 workers"):
        assign_engines(nodes_of([EngineWorker("w", "n", units=4)]), [2, 2])


powers = st.sampled_from([1, 2, 4])


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    batches=st.lists(st.lists(powers, min_size=1, max_size=12), min_size=1, max_size=4),
)
def test_engines_never_share_a_gpu_or_worker_and_what_need_not_change_does_not(
    sizes: list[int], batches: list[list[int]]
) -> None:
    workers = [EngineWorker(f"{n}-{i}", f"{n}") for n, size in enumerate(sizes) for i in range(size)]
    nodes = nodes_of(workers)
    now: list[EngineAssignment] = []
    for degrees in batches:
        if _fits(sizes, degrees):
            engines = assign_engines(nodes, degrees, now)
        else:
            with pytest.raises(BadInput):
                assign_engines(nodes, degrees, now)
            continue
        assert sorted(one.tp_degree for one in engines) == sorted(degrees)
        assert len({one.worker for one in engines}) == len(engines)
        taken = [(one.worker.partition("-")[0], gpu) for one in engines for gpu in one.gpus]
        assert len(set(taken)) == len(taken) == sum(degrees)
        assert all(len(one.gpus) == one.tp_degree for one in engines)
        assert sorted(assign_engines(nodes, degrees, engines), key=str) == sorted(engines, key=str)
        if len(nodes) == 1:
            was, wants = [s.tp_degree for s in now], list(degrees)
            stay = sum(min(was.count(d), wants.count(d)) for d in (1, 2, 4))
            assert sum(one in now for one in engines) == stay
        now = engines


def _fits(sizes: Sequence[int], degrees: Sequence[int]) -> bool:
    """Degrees that divide one another fit if the largest first, anywhere, find room."""
    left = list(sizes)
    for degree in sorted(degrees, reverse=True):
        at = next((i for i, room in enumerate(left) if room >= degree), None)
        if at is None:
            return False
        left[at] -= degree
    return True


# -- forecasts -------------------------------------------------------------------------------------


def test_the_predictor_is_asked_for_prompts_only_once_it_has_learnt() -> None:
    spec = TrajectorySpec(TrajectoryId("t"), GroupId("g"), 0, "d", 40)
    assert asyncio.run(forecast(None, [spec])) == []
    assert asyncio.run(forecast(Oracle(KnownWork()), [spec])) == []
    predictor = LearnedPredictor()
    assert asyncio.run(forecast(predictor, [spec])) == [], "it would answer with a constant"
    predictor.warm_start(Finished(f"t{i}", f"g{i}", "d", prompt_tokens=40, generated_tokens=100 + i) for i in range(20))
    (predicted,) = asyncio.run(forecast(predictor, [spec]))
    assert 80 < predicted.median_tokens <= predicted.q90_tokens < 200


# -- specs and costs -------------------------------------------------------------------------------


def test_an_engine_of_another_degree_has_its_slots_cost_and_gpus(model_dir: str) -> None:
    spec = EngineSpec("emulated", model_dir, 4, 4096, options=EmulatedOptions(PROFILE))
    pair = TpDegreeSpecs(spec).at(2, ("0", "3"))
    assert (pair.tp_degree, pair.slots, pair.devices) == (2, 8, ("0", "3"))
    assert pair.options == EmulatedOptions(PROFILE)
    assert EngineSpec.from_mapping(pair.to_mapping()) == pair
    engines = TpDegreeSpecs(spec).engines()
    assert sorted(engines) == [1, 2, 4, 8, 16]
    assert engines[2].cost.fixed_s < engines[1].cost.fixed_s
    by_degree = {"1": {"seconds_per_token": 0.004}, "2": {"seconds_per_token": 0.003}}
    given = TpDegreeSpecs(
        EngineSpec("emulated", model_dir, 4, 4096, options=EmulatedOptions(by_degree, time_scale=2.0))
    )
    assert emulated_options(given.at(2).options).cost == {"seconds_per_token": 0.003}
    assert {d: engine.cost.decode_token_s(1, 0) for d, engine in given.engines().items()} == {
        1: pytest.approx(0.008),
        2: pytest.approx(0.006),
    }
    told = given.described((1, 2, 4))
    assert told is not None and (told["tp_degree"], sorted(told["by_degree"])) == (1, ["1", "2"])
    assert told["of"] == told["by_degree"]["1"], "in real seconds, as tools and transfers are"
    assert [cost_from_mapping(told["by_degree"][d]).fixed_s for d in "12"] == [0.008, 0.006]
    given = TpDegreeSpecs(EngineSpec("emulated", model_dir, 4, 4096, options=EmulatedOptions(by_degree)))
    assert given.described((1, 2, 4)) == {
        "of": {"seconds_per_token": 0.004},
        "tp_degree": 1,
        "by_degree": by_degree,
    }


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ({"seconds_per_token": 0.002}, "TP degree 2 is not known, only that of TP degree 1: give a profile"),
        (None, "degree 2 is not known"),
        ({"1": {"seconds_per_token": 0.002}}, "degree 2 is not given, only of 1"),
        ({"table": "tiny-agent-cpu"}, "of TP degree 1, asked for 2"),
    ],
)
def test_a_cost_that_is_not_known_at_a_degree_is_refused(
    model_dir: str, cost: Mapping[str, Any] | None, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        TpDegreeSpecs(EngineSpec("emulated", model_dir, 4, 4096, options=EmulatedOptions(cost))).at(2)


def test_a_real_engine_needs_a_cost_for_auto_and_heads_that_divide(model_dir: str) -> None:
    specs = TpDegreeSpecs(EngineSpec("vllm", model_dir, 4, 2048))
    assert specs.at(2).slots == 8
    with pytest.raises(BadInput, match="tp_degrees 'auto' need to know what an engine costs"):
        specs.engines()
    with pytest.raises(BadInput, match="TP degree 3 does not divide the 4 attention heads"):
        specs.at(3)
    assert sorted(TpDegreeSpecs(specs.spec, PROFILE).engines()) == [1, 2, 4]


def test_without_degrees_the_cost_is_described_as_ever(model_dir: str) -> None:
    cost = {"seconds_per_token": 0.002}
    spec = EngineSpec("emulated", model_dir, 4, 4096, options=EmulatedOptions(cost))
    assert TpDegreeSpecs(spec).described(()) == {"of": cost, "tp_degree": 1}
    assert TpDegreeSpecs(EngineSpec("vllm", model_dir, 4, 4096)).described(()) is None
    assert cost_at(cost, 1, 1) is cost


def test_gpus_are_named_by_gpu_engines_only(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sees = {"CUDA_VISIBLE_DEVICES": "0, GPU-7"}
    assert visible_gpus(EngineSpec("emulated", model_dir, 4, 4096), sees) == []
    monkeypatch.setattr("heddle_dask.engines.vllm_command.installed_vllm_build", lambda: "gpu")
    assert visible_gpus(EngineSpec("vllm", model_dir, 4, 4096), sees) == ["0", "GPU-7"]
    assert visible_gpus(EngineSpec("vllm", model_dir, 4, 4096), {}) == []


def test_a_gpu_engine_sees_its_gpus_only(model_dir: str) -> None:
    pair = TpDegreeSpecs(EngineSpec("vllm", model_dir, 4, 2048)).at(2, ("3", "GPU-7"))
    command = vllm_command(pair, EngineAddress("/run/e.sock"), "gpu")
    assert command.env["CUDA_VISIBLE_DEVICES"] == "3,GPU-7"
    assert " --tensor-parallel-size 2 " in " ".join(command.argv)
    assert "CUDA_VISIBLE_DEVICES" not in vllm_command(pair, EngineAddress("/run/e.sock"), "cpu").env
    with pytest.raises(BadInput, match="engine devices are 3, GPU-7: name 1, one for each"):
        EngineSpec("vllm", model_dir, 4, 2048, devices=("3", "GPU-7"))


@pytest.mark.parametrize("asked", ["2,1", [], [0], [1.5], [True], "automatic", 2])
def test_degrees_that_are_none_are_refused(asked: Any) -> None:
    with pytest.raises(BadInput, match="use 'auto' or a list of whole numbers of at least 1"):
        checked_degrees(asked)


def test_the_options_are_read(tmp_path: Path) -> None:
    assert [parsed_degrees(text) for text in (None, "auto", "2, 1,1")] == [None, "auto", (2, 1, 1)]
    for text in ("2;1", "0", "", "2,"):
        with pytest.raises(BadInput, match="--tp"):
            parsed_degrees(text)
    file = tmp_path / "cost.toml"
    file.write_text("[1]\nseconds_per_token = 0.004\n")
    assert parsed_cost(str(file)) == {"1": {"seconds_per_token": 0.004}}
    assert parsed_cost("qwen3-8b-h100") == PROFILE
    assert parsed_cost("tiny-agent-cpu") == {"table": "tiny-agent-cpu"}
    with pytest.raises(BadInput, match=r"--cost 'qwen' is unknown: give a profile \(qwen3-14b-h100"):
        parsed_cost("qwen")


# -- orders ----------------------------------------------------------------------------------------


class Told:
    """What a deployment tells workers, in order."""

    def __init__(self, gone: Sequence[str] = ()) -> None:
        self.log: list[Any] = []
        self.deployment = EngineDeployment(self.tell, lambda worker: self.log.append(("retire", worker)))
        self.gone = gone

    async def tell(self, worker: str, spec: Mapping[str, Any] | None) -> None:
        await asyncio.sleep(0.01 if worker == "tcp://a" else 0)
        if worker in self.gone:
            raise OSError("gone")
        self.log.append((worker, spec))


def order(name: str, tp_degree: int, *gpus: str) -> Order:
    return EngineAssignment(name, tp_degree, gpus), {"tp_degree": tp_degree}


def test_engines_start_when_those_before_have_ended_and_others_are_left_alone() -> None:
    told = Told()

    async def body() -> None:
        for name in "abc":
            told.deployment.worker_waits(f"tcp://{name}", EngineWorkerReport(name, "n", 1))
        await told.deployment.deploy([order(name, 1, str(at)) for at, name in enumerate("abc")])
        told.log.clear()
        answer = await told.deployment.deploy([order("a", 2, "0", "1"), order("c", 1, "2")])
        assert answer == ["a", "b"]

    asyncio.run(body())
    one, two = {"tp_degree": 1}, {"tp_degree": 2}
    assert told.log[:2] == [("retire", "tcp://a"), ("retire", "tcp://b")]
    assert told.log[2:] == [("tcp://b", None), ("tcp://a", None), ("tcp://a", two)], one


def test_a_worker_that_comes_back_gets_its_order_and_one_that_has_gone_is_forgotten() -> None:
    told = Told(gone=["tcp://b"])

    async def body() -> None:
        for name in "ab":
            told.deployment.worker_waits(f"tcp://{name}", EngineWorkerReport(name, "n", 1))
        await told.deployment.deploy([order("a", 1, "0"), order("b", 1, "1")])
        assert (await told.deployment.report(GetDeployedEngines())).workers == ("a",)
        told.log.clear()
        told.deployment.forget_worker("tcp://a")
        told.deployment.worker_waits("tcp://a2", EngineWorkerReport("a", "n", 1))
        await asyncio.sleep(0.05)

    asyncio.run(body())
    assert told.log == [("tcp://a2", {"tp_degree": 1})]


# -- a cluster -------------------------------------------------------------------------------------


class KnownAgent(ToolAgent):
    """Says beforehand how much each task generates: one is ten times as long as the others."""

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return [Task(f"t{i}", "Prompt.", known_tokens=self._tokens(i)) for i in range(count)]

    def _tokens(self, number: int) -> int:
        return self.tokens * (10 if number == 0 else 1)

    async def solve(self, task: Task, ctx: Context) -> float | None:
        ctx.append("user", task.prompt)
        await ctx.generate(max_tokens=self._tokens(int(task.task_id[1:])), ignore_eos=True)
        return 1.0


def emulated_at_degrees(model: str) -> EngineSpec:
    """Engines of two GPUs are nearly twice as fast."""
    cost = {"1": {"seconds_per_token": 0.004}, "2": {"seconds_per_token": 0.0022}}
    return EngineSpec("emulated", model, slots=4, max_model_len=4096, options=EmulatedOptions(cost))


def servers() -> list[psutil.Process]:
    """Emulated engines themselves, without the guards around them."""
    return [p for p in descendants(ENGINE) if "watchdog.py" not in " ".join(p.cmdline())]


async def published(client: Client) -> dict[str, float]:
    """The LLM slots of each rollout worker: what it publishes, without the steps ahead."""
    assert client.scheduler is not None
    workers = (await client.scheduler.identity(n_workers=-1))["workers"].values()
    told = {w["name"]: w["resources"].get("LLM", 0) for w in workers if "ENGINE" in w["resources"]}
    ahead = emulated_at_degrees("any").steps_ahead
    return {name: slots - ahead if slots else 0 for name, slots in told.items()}


@pytest.mark.cluster
@pytest.mark.slow
def test_engines_change_their_degrees_between_rollouts_and_back(model_dir: str, tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    seen: list[dict[str, float]] = []
    pids: list[set[int]] = []

    async def body() -> None:
        async with cluster(engines=4) as (_, client):
            rollout = Rollout(
                client,
                env=ToolAgent(),
                model=model_dir,
                engines=Engines(spec=emulated_at_degrees(model_dir), tp_degrees=[1, 1, 1, 1]),
                samples=2,
                out=out,
            )
            async with rollout:
                for degrees in ((1, 1, 1, 1), (2, 1, 1), (1, 1, 1, 1)):
                    rollout.tp_degrees = degrees
                    batch = await rollout.run(8)
                    assert batch.counts == {"completed": 16}
                    assert rollout.running_tp_degrees == degrees
                    seen.append(await published(client))
                    pids.append({p.pid for p in servers()})
            await until(lambda: not servers())

    run(body(), hang_s=200)
    names = [f"rollout-{i}" for i in range(4)]
    assert seen[0] == seen[2] == dict.fromkeys(names, 4)
    assert seen[1] == {"rollout-0": 8, "rollout-1": 0, "rollout-2": 4, "rollout-3": 4}
    assert [len(each) for each in pids] == [4, 3, 4], "no engine is left where none is wanted"
    assert len(pids[0] & pids[1]) == len(pids[1] & pids[2]) == 2, "the others were left alone"
    lines = control_lines(out)
    joined = [line[0] for line in lines if line[0][0] == "EngineJoined"]
    assert sum(line[0][0] == "EngineLost" for line in lines) == 3
    assert sorted(event[2][3] for event in joined) == [1] * 6 + [2]
    assert len({event[2][0] for event in joined}) == 7, "each has an id of its own"
    reader = RunReader(out)
    assert len(reader) == 48
    used = {step.engine_id.split("/")[0] for record in list(reader)[16:32] for step in record.steps}
    assert used == {"rollout-0", "rollout-2", "rollout-3"}
    decided = [command[2] for line in lines for command in line[1] if command[0] == "DeployEngines"]
    assert decided == [[1, 1, 1, 1], [2, 1, 1], [1, 1, 1, 1]]
    assert not any(line[0][0] == "DegreesPlanned" for line in lines), "what is asked for needs no search"
    assert list(replay(Controller(strategies_of_run(reader.metadata)), lines)) == []


@pytest.mark.cluster
@pytest.mark.slow
def test_auto_decides_by_known_work_and_a_killed_worker_comes_back_at_its_degree(model_dir: str) -> None:
    told: list[str] = []

    async def body() -> None:
        async with cluster(engines=4) as (made, client):
            rollout = Rollout(
                client,
                env=KnownAgent(tokens=60),
                model=model_dir,
                engines=Engines(spec=emulated_at_degrees(model_dir), tp_degrees="auto"),
                progress=told.append,
            )
            async with rollout:
                batch = await rollout.run(3)
                assert batch.counts == {"completed": 3}
                # Two engines for three trajectories gain less than a mix must: both GPUs of each go to one.
                assert rollout.running_tp_degrees == (2, 2), told
                nanny = psutil.Process(made.workers["rollout-0"]._process.program_pid)
                (worker,) = [c for c in nanny.children() if "resource_tracker" not in " ".join(c.cmdline())]
                kill(worker.pid)
                assert (await _until_ready(client, 2)).tp_degrees == (2, 2)
                assert await published(client) == {
                    "rollout-0": 8,
                    "rollout-1": 0,
                    "rollout-2": 8,
                    "rollout-3": 0,
                }
                # The same again: nothing is to be gained by a restart.
                batch = await rollout.run(3)
                assert batch.counts == {"completed": 3}
                assert rollout.running_tp_degrees == (2, 2), told
            await until(lambda: not servers())

    run(body(), hang_s=200)
    decided = [line for line in told if line.startswith("TP degrees 2,2 for 3 trajectories by known")]
    assert len(decided) == 2
    assert sum(line.startswith("starting") for line in told) == 1


async def _until_ready(client: Client, engines: int) -> DeployedEngines:
    """After a worker was killed: its engine is lost, then it is back."""
    lost = False
    for _ in range(600):
        ready = len((await ask_scheduler(client, GetCapacity())).engines)
        lost = lost or ready < engines
        if lost and ready == engines:
            return await ask_scheduler(client, GetDeployedEngines())
        await asyncio.sleep(0.05)
    raise AssertionError("the worker's engine does not come back")


@pytest.mark.cluster
def test_what_cannot_be_is_one_line_and_auto_learns_from_the_batch_before(model_dir: str) -> None:
    told: list[str] = []

    async def body() -> None:
        async with shared_cluster() as client:

            def rollout(spec: EngineSpec, degrees: Any) -> Rollout:
                patience = Patience(workers_s=5.0)
                return Rollout(
                    client,
                    env=ToolAgent(),
                    model=model_dir,
                    engines=Engines(spec=spec, tp_degrees=degrees, patience=patience),
                    progress=told.append,
                )

            spec = emulated_at_degrees(model_dir)
            with pytest.raises(BadInput, match="TP degrees 2,1 need 3 GPUs and 2 workers"):
                await rollout(spec, [2, 1]).run(2)
            with pytest.raises(BadInput, match="degree 4 is not given, only of 1, 2"):
                await rollout(spec, [4]).run(2)
            with pytest.raises(BadInput, match="tp_degrees were not given when this rollout opened"):
                fixed = rollout(EngineSpec("emulated", model_dir, 4, 4096), None)
                fixed.tp_degrees = [1]
                await fixed.run(2)
            unknown = rollout(spec, "auto")
            async with unknown:
                assert (await unknown.run(2)).counts == {"completed": 2}
                assert unknown.running_tp_degrees == (1, 1), "nothing is known at first"
                assert any(line.startswith("nothing is known yet") for line in told)
                assert (await unknown.run(2)).counts == {"completed": 2}
                assert any("for 2 trajectories by earlier trajectories" in line for line in told)
                assert unknown.running_tp_degrees == (1, 1), "a restart takes longer than the whole batch"

    run(body())
