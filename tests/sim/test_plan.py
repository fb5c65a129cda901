"""``heddle plan``: which fleets a budget can form, what they are worth when played, and what is refused."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from worlds.batch_builders import capped_works

from heddle_dask.cli.one_line import OneLineGroup
from heddle_dask.cli.plan.command import plan as plan_command
from heddle_dask.cli.simulate import simulate as simulate_command
from heddle_dask.core.errors import BadInput
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.plan import budget_of, engines_in_words, played_of, ranked, works_of
from heddle_dask.sim.rollout import Arm, check_fit
from heddle_dask.sim.sweep import SimulatedWorkload, SimulationJob, run_job, run_jobs
from heddle_dask.workloads.planned import PlannedStep, PlannedTrajectory

WORK = SimulatedWorkload("coding", 32, 4, 20_000)
SMALL = (
    *("--workload", "coding", "--cluster", "small.toml", "--model", "qwen3-8b", "--trajectories", "32"),
    *("--samples", "4", "--max-context-tokens", "20000", "--strategy", "heddle:predictor=oracle"),
)
NODE = Cluster(gpus=4, gpus_per_node=4, slots=8)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text("gpus = 4\ngpus-per-node = 4\nslots = 8\n")


def invoke(command: str, *arguments: object) -> Result:
    group = OneLineGroup("heddle")
    group.add_command(plan_command)
    group.add_command(simulate_command)
    return CliRunner().invoke(group, [command, *map(str, arguments)])


def planned(*arguments: object) -> dict:  # type: ignore[type-arg]
    result = invoke("plan", *SMALL, *arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    assert len(result.stdout.splitlines()) == 1
    return json.loads(result.stdout)


# -- what the search is told ---------------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(st.integers(1, 50), st.integers(0, 80), st.floats(0, 5)).map(
        lambda each: PlannedStep(each[0], each[1], "tool", each[2])
    ),
    min_size=1,
    max_size=6,
)


@given(prompt=st.integers(1, 200), steps=steps)
def test_a_work_is_what_the_trajectory_asks_for(prompt: int, steps: list[PlannedStep]) -> None:
    one = PlannedTrajectory("t", "g", 0, "d", prompt, tuple(steps))
    (work,) = works_of([one])
    context, read = prompt, 0.0
    for step in steps:
        for _ in range(step.generated_tokens):
            read += context + 0.5  # the mean of the context before and after the token
            context += 1
        context += step.observation_tokens
    assert work.area == pytest.approx(read)
    assert work.decode_tokens == one.generated_tokens
    assert work.shared_tokens == prompt
    assert work.prefill_tokens == sum(step.observation_tokens for step in steps[:-1])
    assert work.tool_s == one.tools_s


def test_what_is_foreseen_is_another_draw_of_the_same_size() -> None:
    foreseen = WORK.foreseen(0)
    assert len(foreseen) == 32
    assert foreseen != WORK.drawn(0)
    assert foreseen == WORK.foreseen(0)


# -- candidates ----------------------------------------------------------------------------------------------------


def test_every_feasible_uniform_degree_and_the_searched_one_are_candidates() -> None:
    works = works_of(WORK.foreseen(0))
    for gpus in (1, 2, 3, 4, 6, 8):
        budget = budget_of(NODE, gpus, "qwen3-8b", works, max_context_tokens=20_000, seed=0)
        uniform = [one.tp_degrees for one in budget.candidates if len(set(one.tp_degrees)) == 1]
        feasible = [degree for degree in (4, 2, 1) if degree <= gpus]
        assert [degrees[0] for degrees in uniform][: len(feasible)] == feasible
        assert all(len(degrees) == gpus // degrees[0] for degrees in uniform)
        assert sorted(budget.refused) == [degree for degree in (1, 2, 4) if degree > gpus]
        assert sum(one.searched for one in budget.candidates) == 1
        assert all(sum(one.tp_degrees) <= gpus for one in budget.candidates)
        searched = next(one for one in budget.candidates if one.searched)
        assert searched.by_work_s == min(one.by_work_s for one in budget.candidates)
        for one in budget.candidates:
            assert [spec.slots for spec, _ in one.fleet.engines] == [8] * len(one.tp_degrees)
            check_fit(WORK.drawn(0), one.fleet)


def test_a_heavy_tail_gets_a_mix_of_degrees_with_slots_by_degree() -> None:
    works = capped_works(400, 0)
    budget = budget_of(Cluster(gpus=8), 8, "qwen3-8b", works, max_context_tokens=40_960, seed=0)
    mix = budget.candidates[-1]
    assert mix.searched and len(set(mix.tp_degrees)) > 1
    assert mix.by_work_s < min(one.by_work_s for one in budget.candidates[:-1])
    assert [spec.tp_degree for spec, _ in mix.fleet.engines] == list(mix.tp_degrees)
    assert [spec.slots for spec, _ in mix.fleet.engines] == [100 * degree for degree in mix.tp_degrees]
    assert len({spec.engine_id for spec, _ in mix.fleet.engines}) == len(mix.tp_degrees)


def test_degrees_that_cannot_be_say_why() -> None:
    works = works_of(WORK.foreseen(0))
    large = budget_of(Cluster(gpus=4), 4, "qwen3-32b", works, max_context_tokens=20_000, seed=0)
    assert "engines of 8 GPUs on a cluster of 4" in large.refused[8]
    assert "KV room" in large.refused[1]
    # A 72B model in bfloat16 is larger than one card.
    shape = {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 29_568, "vocab_size": 152_064}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128}
    Path("odd").mkdir()
    Path("odd/config.json").write_text(json.dumps({"model_type": "qwen2", **shape, **heads}))
    odd = budget_of(Cluster(gpus=8), 8, "odd", works, max_context_tokens=20_000, seed=0)
    assert "does not divide the model's 12 attention heads" in odd.refused[8]
    assert "does not fit on 1 GPUs" in odd.refused[1]
    assert [one.tp_degrees for one in odd.candidates if not one.searched or len(set(one.tp_degrees)) == 1]
    six = budget_of(Cluster(gpus=6, gpus_per_node=6), 6, "qwen3-8b", works, max_context_tokens=20_000, seed=0)
    assert "does not divide a node of 6" in six.refused[4]


def test_the_search_is_seeded_and_told_nothing_of_the_played_draws() -> None:
    works = works_of(WORK.foreseen(0))
    found = [budget_of(NODE, 8, "qwen3-8b", works, max_context_tokens=20_000, seed=0) for _ in range(2)]
    assert [one.tp_degrees for one in found[0].candidates] == [one.tp_degrees for one in found[1].candidates]


# -- playing -------------------------------------------------------------------------------------------------------


def test_jobs_give_the_same_alone_and_in_a_row() -> None:
    fleets = [Cluster(gpus=4, gpus_per_node=4, tp=tp, slots=8) for tp in (1, 2)]
    jobs = [
        SimulationJob(WORK, cluster.fleet("qwen3-8b", max_context_tokens=20_000), arm, seed, warm=False)
        for seed in (0, 1)
        for cluster in fleets
        for arm in (Arm.parse("slime"), Arm.parse("heddle:predictor=oracle"))
    ]
    assert [run_job(job).figures() for job in jobs] == [one.figures() for one in run_jobs(jobs)]


def test_the_chosen_candidate_ended_first_and_costs_what_it_took() -> None:
    result = planned("--seeds", 2, "--price-per-gpu-hour", 3)
    (budget,) = result["budgets"]
    assert budget["gpus"] == 4
    medians = [statistics.median(row["makespan_s"] for row in one["rows"]) for one in budget["candidates"]]
    assert medians == sorted(medians)
    best, chosen = budget["candidates"][0], budget["chosen"]
    assert chosen["degrees"] == best["degrees"] and "rows" not in chosen
    assert chosen["engines"] == len(chosen["degrees"])
    assert chosen["makespan_s"] == pytest.approx(medians[0], abs=1e-3)
    hours = 4 * medians[0] / 3600 / 32 * 1000
    assert chosen["gpu_hours_per_thousand"] == pytest.approx(hours, abs=1e-4)
    assert chosen["price_per_thousand"] == pytest.approx(3 * hours, abs=1e-3)
    assert chosen["trajectories_per_h"] == pytest.approx(32 / medians[0] * 3600, abs=0.1)
    assert all(0 < one["bound_share"] <= 1 and 0 < one["path_share"] <= 1 for one in budget["candidates"])
    assert all(0 < one["steps_per_s"] < one["tokens_per_s"] for one in budget["candidates"])
    assert len(budget["next_over_chosen"]) == 2
    assert len(best["rows"]) == 2
    assert result["conditions"]["price_per_gpu_hour"] == 3


def test_a_candidate_is_what_heddle_simulate_plays() -> None:
    (budget,) = planned("--seeds", 1)["budgets"]
    by_degrees = {tuple(one["degrees"]): one["rows"] for one in budget["candidates"]}
    for degree, count in ((1, 4), (2, 2), (4, 1)):
        result = invoke("simulate", *SMALL, "--seeds", 1, "--tp", degree, "--json")
        assert json.loads(result.stdout)["rows"] == by_degrees[(degree,) * count]


def test_a_row_for_each_budget_with_its_best_degrees() -> None:
    result = planned("--seeds", 1, "--gpus", "2,4,8")
    assert [one["gpus"] for one in result["budgets"]] == [2, 4, 8]
    # One batch for all budgets: that is what makes them comparable.
    rows = [row for one in result["budgets"] for each in one["candidates"] for row in each["rows"]]
    assert len({(row["trajectories"], row["tokens"]) for row in rows}) == 1
    spans = [one["chosen"]["makespan_s"] for one in result["budgets"]]
    assert spans == sorted(spans, reverse=True)
    text = invoke("plan", *SMALL, "--seeds", 1, "--gpus", "2,4,8").stdout
    best = text.partition("best engines")[2].splitlines()[1:]
    assert [line.split()[0] for line in best] == ["2", "4", "8"]
    assert "100%" in best[0]
    assert text.count("\n* ") == 3


def test_a_budget_on_which_nothing_fits_is_a_row_and_not_the_end() -> None:
    arguments = ("--model", "qwen3-32b", "--gpus", "1,4", "--seeds", 1)
    first, second = planned(*arguments)["budgets"]
    assert first["chosen"] is None and first["candidates"] == []
    assert second["chosen"]["degrees"]
    assert "out: engine-0 (TP 1) has KV room" in invoke("plan", *SMALL, *arguments).stdout


def test_with_a_walltime_the_engines_that_complete_most_come_first() -> None:
    Path("small.toml").write_text("gpus = 4\ngpus-per-node = 4\nslots = 8\n[faults]\nwalltime-s = 60\n")
    result = invoke("plan", *SMALL, "--seeds", "2", "--price-per-gpu-hour", "2", "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    (budget,) = json.loads(result.stdout)["budgets"]
    completed = [one["completed"] for one in budget["candidates"]]
    assert completed == sorted(completed, reverse=True) and 0 < completed[0] < 32
    for one in budget["candidates"]:
        counts = [row["completed"] for row in one["rows"]]
        assert f"only {counts[0]}, {counts[1]} (by seed) of 32 trajectories completed" in result.stderr
        assert one["trajectories_per_h"] == pytest.approx(one["completed"] / one["makespan_s"] * 3600, rel=1e-3)
        assert max(row["makespan_s"] for row in one["rows"]) == 60
    Path("small.toml").write_text("gpus = 4\ngpus-per-node = 4\n[faults]\nwalltime-s = 0.01\n")
    (budget,) = planned("--seeds", "1")["budgets"]
    assert budget["chosen"]["completed"] == 0 and budget["chosen"]["gpu_hours_per_thousand"] is None


def test_the_batch_grows_with_the_largest_budget_unless_given() -> None:
    arguments = ("--workload", "math", "--model", "qwen3-8b", "--strategy", "slime", "--seeds", 1, "--json")
    result = invoke("plan", *arguments, "--gpus", "1,2", "--token-scale", 0.05)
    assert json.loads(result.stdout)["conditions"]["trajectories"] == 192
    last = result.stderr.splitlines()[-1]  # the table, whose budget of one GPU has only one degree
    assert "192" in result.stderr and "best engines" in result.stderr and last.split()[0] == "2"


def test_ranking_takes_the_earliest_and_then_the_fewest_engines() -> None:
    works = works_of(WORK.foreseen(0))
    budget = budget_of(NODE, 4, "qwen3-8b", works, max_context_tokens=20_000, seed=0)
    fleet = budget.candidates[0].fleet
    one = run_job(SimulationJob(WORK, fleet, Arm.parse("slime"), 0, warm=False))
    (played,) = played_of([budget], [one] * len(budget.candidates))
    assert len(ranked(played)[0].candidate.tp_degrees) == 1
    assert engines_in_words((2, 1, 1)) == "1 x TP2 + 2 x TP1"


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workload", "cooking"), "cooking"),
        (("--cluster", "hopper63"), "hopper63"),
        (("--model", "qwen9"), "qwen9"),
        (("--gpus", "0"), "--gpus '0'"),
        (("--gpus", ""), "--gpus ''"),
        (("--gpus", "8,many"), "whole numbers"),
        (("--model", "qwen3-32b", "--gpus", "1"), "qwen3-32b fits no engine that 1 GPUs can form"),
        (("--max-context-tokens", "9000000"), "fits no engine"),
        (("--strategy", "best"), "unknown strategy 'best'"),
        (("--strategy", "verl,slime"), "names 2"),
        (("--set", "order=fcfs"), "unknown part 'order'"),
        (("--price-per-gpu-hour", "-1"), "price-per-gpu-hour"),
        (("--price-per-gpu-hour", "nan"), "price-per-gpu-hour"),
        (("--trajectories", "30"), "no multiple of 4"),
        (("--seeds", "0"), "seeds"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    result = invoke("plan", *SMALL, *arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert said in line


def test_why_nothing_fits_is_said_of_a_degree_that_the_shapes_allow() -> None:
    """28 heads do not divide by 8, but it is the context that is too long for each degree."""
    config = {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    }
    Path("odd").mkdir()
    Path("odd", "config.json").write_text(json.dumps(config))
    Path("node.toml").write_text("gpus = 8\ngpus-per-node = 8\n")
    chosen = ["--cluster", "node.toml", "--model", "odd", "--max-context-tokens", "9000000"]
    result = invoke("plan", *SMALL, *chosen)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "odd fits no engine that 8 GPUs can form: " in line
    assert "heads" not in line and "TP 4" in line


def test_more_gpus_help_by_what_is_completed_where_a_walltime_cuts_off() -> None:
    Path("small.toml").write_text("gpus = 4\ngpus-per-node = 4\nslots = 8\n[faults]\nwalltime-s = 40\n")
    result = invoke("plan", *SMALL, "--seeds", "1", "--gpus", "1,4", "--strategy", "slime")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if "of proportional" in line)
    names = [name for name in lines[head].split("  ") if name]
    few, many = ([cell for cell in line.split("  ") if cell] for line in lines[head + 1 : head + 3])
    at, rate = (next(i for i, name in enumerate(names) if part in name) for part in ("speed-up", "trajectories/h"))
    rates = [float(row[rate].replace(",", "")) for row in (few, many)]
    assert rates[1] > 1.2 * rates[0]
    assert float(many[at]) == pytest.approx(rates[1] / rates[0], abs=0.01)


def test_an_empty_budget_is_refused() -> None:
    with pytest.raises(BadInput, match="0 GPUs"):
        budget_of(NODE, 0, "qwen3-8b", works_of(WORK.foreseen(0)), max_context_tokens=20_000, seed=0)


def test_two_hash_seeds_give_the_same_report() -> None:
    script = f"from heddle_dask.cli.plan.command import plan; plan([*{SMALL!r}, '--seeds', '1', '--json'])"
    outputs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1] and outputs[0]
