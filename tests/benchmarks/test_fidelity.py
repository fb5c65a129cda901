"""``python -m benchmarks fidelity``: like is compared with like, seconds add up, ties are ties, and both sides run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from worlds.live_world import run

from benchmarks.command import bench
from benchmarks.fidelity import (
    ArmFidelity,
    LiveRun,
    as_json,
    check_arm,
    compare,
    ranking,
    read_runs,
    run_live,
    run_of,
)
from benchmarks.fidelity_spent import (
    Life,
    Spent,
    WatchedWorkload,
    first_admission_s,
    spent_live,
    spent_simulated,
)
from benchmarks.fidelity_twins import Twins, delays_of, twins_of
from benchmarks.live_rows import LiveRows
from benchmarks.live_setup import LiveRow
from benchmarks.process_usage import CpuSeconds, cpu_seconds, is_server
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import EngineId, StepId, TrajectoryId
from heddle_dask.core.nouns import EngineDescription
from heddle_dask.cost.engine_cost import fixed_cost, load_profile
from heddle_dask.cost.measured import MeasuredTable
from heddle_dask.cost.table_fit import fit_table
from heddle_dask.engines.emulated.options import emulated_options
from heddle_dask.records.trajectory import ActionRecord, StepRecord
from heddle_dask.sim.engine import SimulatedEngine
from heddle_dask.sim.fleet import ControlDelays
from heddle_dask.sim.kv_cache import CountedKvCache, SimulatedJob
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.sim.rollout import Arm, simulate

CONTEXT = 600
SPENT = Spent(0.0, 1.0, 0.5, 0.3, 0.2, 0.1, 0.1, 0.01, 5, 10, 20, 0, 0)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve trajectories in four groups."""
    lines = []
    for index in range(12):
        steps = [
            {"gen_tokens": 10 + index, "obs_tokens": 30, "tool": "bash", "tool_s": 0.05},
            {"gen_tokens": 20, "obs_tokens": 12, "tool": "read", "tool_s": 0.01},
            {"gen_tokens": 8 * (index % 3) + 1, "obs_tokens": None, "tool": None, "tool_s": None},
        ]
        body = {"id": f"t{index}", "group": f"g{index % 4}", "prompt_tokens": 100, "complete": True}
        lines.append(json.dumps({**body, "steps": steps}) + "\n")
    path = tmp_path / "twelve.jsonl"
    path.write_text("".join(lines))
    return path


def compared(name: str, least_s: float, median_s: float, most_s: float, simulated_s: float) -> ArmFidelity:
    error = simulated_s / median_s - 1
    seconds = (median_s, least_s, most_s, simulated_s, simulated_s, simulated_s)
    return ArmFidelity("w", name, *seconds, error, SPENT, SPENT)


def test_overlapping_live_ranges_are_ties_and_the_others_must_be_ordered_alike() -> None:
    a, b, c = compared("a", 9, 10, 11, 10.4), compared("b", 10, 10.5, 12, 10.2), compared("c", 13, 14, 15, 13)
    found = ranking([b, c, a])
    assert (found.decided, found.agreeing, found.agrees) == (2, 2, True)
    assert found.live == ("a", "b", "c") and found.simulated == ("b", "a", "c")
    found = ranking([a, b, replace(c, simulated_median_s=10.3)])
    assert (found.decided, found.agreeing, found.agrees) == (2, 1, False)


def test_delays_come_from_the_row_with_the_nearest_number_of_trajectories(tmp_path: Path) -> None:
    path = tmp_path / "overhead.json"
    rows = [
        {"trajectories": 50, "added_ms_p50": 12.0, "action_added_ms_p50": 8.0},
        {"trajectories": 400, "added_ms_p50": 51.0, "action_added_ms_p50": 26.0},
    ]
    path.write_text(json.dumps({"rows": rows}))
    near = delays_of(path, 64)
    assert near.request_s + near.start_s + near.report_s == pytest.approx(0.012)
    assert (2 * near.action_s, near.slot_s) == pytest.approx((0.008, 0.004))
    assert delays_of(path, 300).action_s == pytest.approx(0.013)
    assert delays_of(None, 64).request_s > 0


@pytest.mark.parametrize("text", ["", "[]", '{"rows": []}', '{"rows": [{"trajectories": 3}]}'])
def test_what_is_no_overhead_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BadInput, match="holds no overhead"):
        delays_of(path, 64)
    with pytest.raises(BadInput, match="No such file"):
        delays_of(tmp_path / "absent.json", 64)


def twins(
    model_dir: str,
    kind: str = "emulated",
    time_scale: float = 1.0,
    tables: tuple[str, ...] = ("tiny-agent-cpu",),
) -> Twins:
    return twins_of(
        kind,
        model_dir,
        2,
        3,
        profile="tiny-cpu",
        tables=tables,
        time_scale=time_scale,
        max_context_tokens=CONTEXT,
        delays=ControlDelays(1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3),
    )


def test_emulated_twins_take_and_believe_the_scaled_profile(model_dir: str) -> None:
    pair = twins(model_dir, time_scale=4.0)
    profile = load_profile("tiny-cpu")
    for spec, cost in pair.simulated.engines:
        assert (spec.slots, spec.max_context_tokens) == (3, CONTEXT)
        assert cost.iteration_s(2, 50, 7) == pytest.approx(4 * profile.iteration_s(2, 50, 7))
        assert cost.capacity_tokens == profile.capacity_tokens
    assert pair.simulated.beliefs == {1: profile.scaled(4.0)} and pair.live.cost == profile.scaled(4.0)
    assert (
        emulated_options(pair.live.spec.options).time_scale == 4.0
        and len(pair.simulated.engines) == pair.live.engines == 2
    )


def test_vllm_twins_take_the_table_and_its_way_of_a_request(model_dir: str) -> None:
    pair = twins(model_dir, "vllm")
    (spec, cost), *_ = pair.simulated.engines
    assert pair.live.cost == cost == pair.simulated.beliefs[1]
    assert cost.sequence_s > 0 and spec.kv_capacity_tokens == cost.capacity_tokens == 1_048_576
    delays = pair.simulated.delays
    request_s = delays.slot_s - 6e-3
    assert request_s > 0
    assert (delays.start_s, delays.report_s) == pytest.approx((2e-3 + request_s / 2, 3e-3 + request_s / 2))


def test_tables_of_several_numbers_of_engines_count_while_so_many_are_busy(model_dir: str, tmp_path: Path) -> None:
    alone = MeasuredTable.load("tiny-agent-cpu")
    slower = [replace(point, seconds=3 * point.seconds) for point in alone.decode]
    pair_file = tmp_path / "pair.json"
    crowd = replace(alone, engines=2, decode=tuple(slower), block_tokens=128, chunked_prefill=False)
    crowd.save(pair_file)
    pair = twins(model_dir, "vllm", tables=("tiny-agent-cpu", str(pair_file)))
    fleet = pair.simulated
    assert {count: cost.fixed_s for count, cost in fleet.crowded.items()} == pytest.approx(
        {1: fit_table(alone).cost.fixed_s, 2: fit_table(crowd).cost.fixed_s}
    )
    assert fleet.crowded[2] == pair.live.cost == fleet.engines[0][1] == fleet.beliefs[1]
    assert (pair.live.cost.block_tokens, pair.live.cost.whole_prompts) == (128, True)
    assert twins(model_dir, "vllm", tables=(str(pair_file),)).simulated.crowded == {}
    with pytest.raises(BadInput, match="another one with 2 engines at once is given"):
        twins(model_dir, "vllm", tables=(str(pair_file), str(pair_file)))


def test_a_table_of_another_model_and_a_router_are_refused(tmp_path: Path, model_dir: str) -> None:
    config = json.loads((Path(model_dir) / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(BadInput, match="is of another model"):
        twins(str(other), "vllm")
    with pytest.raises(BadInput, match="no simulation of that router"):
        check_arm(Arm.parse("vllm-router/round_robin"))
    with pytest.raises(BadInput, match="unknown strategy"):
        check_arm(Arm.parse("nonsense"))
    answer = CliRunner().invoke(bench, ["fidelity", "--trace", "absent.jsonl", "--engine", "cray"])
    assert answer.exit_code == 2


def test_plans_are_simulated_in_the_order_of_the_live_tasks_under_their_ids(trace: Path) -> None:
    workload = WatchedWorkload(trace, 6, 1.0, 1.0, 7)
    drawn, _ = workload.planned(CONTEXT)
    names = [task.task_id for task in workload.environment().tasks(6, 7)]
    planned = workload.in_order(drawn)
    assert [plan.trajectory_id for plan in planned] == [f"{name}/0" for name in names]
    assert sorted(names) != names, "the draw happens to be sorted: the test shows nothing"
    assert {plan.trajectory_id[:-2]: plan.steps for plan in planned} == {
        plan.trajectory_id: plan.steps for plan in drawn
    }


def test_seconds_of_a_simulated_run_add_up(trace: Path, model_dir: str) -> None:
    pair = twins(model_dir)
    workload = WatchedWorkload(trace, 1, 1.0, 1.0, 0)
    planned = workload.in_order(workload.planned(CONTEXT)[0])
    (plan,) = planned
    one = simulate("slime", (), pair.simulated, planned, seed=0, watched=True)
    spent = spent_simulated(one, planned, 6e-3)
    assert first_admission_s(one) == 0.0
    assert spent.life_s == pytest.approx(one.makespan_s, abs=1e-3)
    # Three steps, each with the ways to controller, engine and back; two tools with their ways there and back.
    assert spent.between_s == pytest.approx(3 * 6e-3 + 2 * 2 * 4e-3, abs=1e-3)
    assert spent.tools_s == pytest.approx(plan.tools_s)
    assert spent.steps == 3 and spent.prefilled_tokens + spent.cached_tokens > 300


def test_seconds_of_a_live_run_add_up() -> None:
    step = StepRecord(0, 0, 100, 120, "e", "length", 100, 20, 64, 0, 0, 0.0, 0.5, 0.1, 0.05, 0.25)
    stopped = replace(step, preemptions=2, cached_tokens=200)
    action = ActionRecord(0, 0, "tool", "bash", 0, "ok", 0.5, 0.8, 0.05, 0.2)
    lives = [Life(10.0, 11.0, (step,), (action,)), Life(10.5, 12.5, (step, stopped), ())]
    row = LiveRow("w", "a", 0, 1.0, 2.5, 0.5, 2, {"recompute": {"started": 3}})
    spent = spent_live(lives, row)
    assert (spent.admitted_s, spent.life_s, spent.tools_s) == pytest.approx((0.25, 1.5, 0.1))
    assert (spent.engine_s, spent.step_s, spent.held_s) == pytest.approx((0.45, 0.3, 0.1))
    assert spent.between_s == pytest.approx(1.5 - 0.45 - 0.1)
    assert (spent.prefilled_tokens, spent.cached_tokens) == (72, 328)
    assert (spent.steps, spent.preemptions, spent.moves) == (3, 2, 3)


def test_engine_servers_are_told_from_what_starts_them() -> None:
    assert is_server(["python", "-m", "vllm.entrypoints.openai.api_server", "--port", "1"])
    assert is_server(["python", "-m", "heddle_dask.engines.emulated", "spec"])
    assert not is_server(["python", "-m", "dask", "worker", "heddle_dask.engines.emulated"])
    assert not is_server([])
    used = cpu_seconds()
    assert used.control_s > 0
    assert CpuSeconds(5.0, 3.0).since(CpuSeconds(1.0, 2.0)) == CpuSeconds(4.0, 1.0)


def slow_worker_engine(time: VirtualTime, ended: list[tuple[str, float]], steps_ahead: int) -> SimulatedEngine:
    """One slot, half a second a job; its worker knows of an end 0.03 s later."""
    return SimulatedEngine(
        EngineDescription(EngineId("e"), 1, 1000),
        fixed_cost(0.1),
        time,
        lambda engine, job: None,
        lambda engine, job: ended.append((job.trajectory_id, time.now_s)),
        ControlDelays(slot_s=0.03, steps_ahead=steps_ahead),
    )


def slow_worker_job(name: str, priority: float) -> SimulatedJob:
    """A step of five tokens."""
    return SimulatedJob(
        prompt_tokens=10,
        length=5,
        priority=priority,
        trajectory_id=name,
        group_id=name,
        shared_tokens=10,
        step_id=StepId(TrajectoryId(name), 0, 0),
    )


def test_a_step_that_waited_for_a_slot_comes_when_the_worker_has_the_answer_before_it() -> None:
    time = VirtualTime()
    ended: list[tuple[str, float]] = []
    engine = slow_worker_engine(time, ended, steps_ahead=0)
    late, urgent = slow_worker_job("late", 2.0), slow_worker_job("urgent", 1.0)
    for one in (slow_worker_job("first", 5.0), late, urgent):
        engine.submit(one)
    engine.abort(late)  # the engine has not heard of it: the worker ends it at once
    time.run()
    assert [name for name, _ in ended] == ["late", "first", "urgent"]
    assert [at for _, at in ended] == pytest.approx([0.0, 0.5, 1.03])


def test_a_step_that_waits_in_the_engine_has_the_slot_at_once_and_one_past_the_line_too() -> None:
    time = VirtualTime()
    ended: list[tuple[str, float]] = []
    engine = slow_worker_engine(time, ended, steps_ahead=1)
    for name, priority in (("first", 5.0), ("ahead", 4.0), ("third", 4.5)):
        engine.submit(slow_worker_job(name, priority))
    engine.submit(replace(slow_worker_job("urgent", 1.0), bypass_queue=True))
    time.run()
    assert [name for name, _ in ended] == ["first", "urgent", "ahead", "third"]
    # The worker sends the third 0.03 s after the first has ended: it is there long before it is its turn.
    assert [at for _, at in ended] == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_a_sibling_with_a_shorter_prompt_leaves_the_longer_one_in_the_cache() -> None:
    """Recorded prompts of one group differ in length: live, the blocks of the longest stay."""

    def job(name: str, prompt_tokens: int) -> SimulatedJob:
        return SimulatedJob(
            prompt_tokens=prompt_tokens,
            length=1,
            trajectory_id=name,
            group_id="g",
            shared_tokens=prompt_tokens,
        )

    cache = CountedKvCache(10_000)
    long, short = job("long", 320), job("short", 64)
    for one in (long, short):
        held = cache.take(one, 0)
        assert held is not None
        cache.give_back(one, held, one.prompt_tokens)
    assert cache.hit_tokens(job("third", 400)) == 320


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.long
def test_both_sides_run_and_do_the_same_work(trace: Path, model_dir: str, tmp_path: Path) -> None:
    """Counts, not seconds: this machine may be busy."""
    pair = twins_of(
        "emulated",
        model_dir,
        2,
        3,
        profile="tiny-cpu",
        tables=("tiny-agent-cpu",),
        time_scale=1.0,
        max_context_tokens=CONTEXT,
        delays=delays_of(None, 8),
    )
    workload = WatchedWorkload(trace, 8, 1.0, 1.0, 3)
    arms = [Arm.parse("verl"), Arm.parse("heddle:predictor=oracle")]
    runs: list[LiveRun] = []
    run(run_live([workload], pair.live, arms, repeats=2, on_run=runs.append))
    found = compare(runs, [workload], pair)
    assert len(runs) == len(found.rows) == 4
    assert {(row.arm, row.repeat) for row in found.rows} == {(arm.name, n) for arm in arms for n in (0, 1)}
    for arm in found.arms:
        assert arm.live.steps == arm.simulated.steps == 24
        assert arm.live.tools_s == pytest.approx(arm.simulated.tools_s, abs=0.05)
        assert arm.live.control_cpu_s > 0 <= arm.live.engines_cpu_s  # the kernel counts an engine's few ms in ticks
        assert arm.live_least_s <= arm.live_median_s <= arm.live_most_s
        assert min(arm.live.engine_s, arm.live.between_s, arm.simulated.between_s) > 0
    sticky = found.arms[0]
    context = sum(plan.context_tokens for plan in workload.planned(CONTEXT)[0])
    assert sticky.live.prefilled_tokens + sticky.live.cached_tokens > context
    told_json = json.loads(json.dumps(as_json(found), allow_nan=False))
    assert len(told_json["rows"]) == 4 and len(told_json["summary"]) == 2
    assert set(told_json["summary"][0]["live"]) == set(Spent.__slots__)
    kept = tmp_path / "fidelity.json"
    kept.write_text(json.dumps(told_json))
    assert compare(read_runs(kept), [workload], pair) == found
    with pytest.raises(BadInput, match="no live runs of other, but of twelve"):
        compare(runs, [WatchedWorkload(trace.with_name("other.jsonl"), 8, 1.0, 1.0, 3)], pair)
    kept.write_text("{}")
    with pytest.raises(BadInput, match="holds no live runs"):
        read_runs(kept)


def test_live_runs_of_a_file_are_not_run_again(tmp_path: Path) -> None:
    out, common = tmp_path / "runs.jsonl", {"kind": "fidelity", "seed": 0, "conditions": "small"}
    made = LiveRun("w", "verl", 0, 2.5, ("engine-0", "idle-0"), SPENT)
    LiveRows(out, common, run_of, str).add(made)
    again = LiveRows(out, common, run_of, str)
    assert again.has("w", "verl", 0) and not again.has("w", "verl", 1) and again.rows == [made]
    assert not LiveRows(out, {**common, "seed": 1}, run_of, str).has("w", "verl", 0)
