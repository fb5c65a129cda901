"""``python -m benchmarks paper``: which runs a sweep makes, that it goes on where it was, and what its tables say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from benchmarks.code_digest import DECIDING, code_digest
from benchmarks.commands.paper import paper
from benchmarks.paper.degrees import fleets_that_fit, predicted_works
from benchmarks.paper.results import PaperResults, ratios
from benchmarks.paper.sweep import (
    PAPER_CELLS,
    PaperCell,
    PaperConditions,
    PaperSweep,
    arms_named,
    cells_named,
    engines_text,
    paper_run,
)
from benchmarks.paper.tables import all_tables, main_tables
from benchmarks.row_file import RowFile
from benchmarks.runner import Runner
from heddle_dask.cli.one_line import OneLineGroup
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.published import model_of
from heddle_dask.predictors.known import KnownWork, NoisyOracle, Oracle
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.deployment import plan_fleet
from heddle_dask.workloads.synthetic import synthesize

SMALL = Cluster(gpus=4, gpus_per_node=4)
CONTEXT = 8_192
MATH_8B = PaperCell("qwen3-8b", "math")


def conditions(trajectories: int | None = 16) -> PaperConditions:
    return PaperConditions("small", SMALL, trajectories, 4, CONTEXT)


def sweep(rows: RowFile, arms: str, trajectories: int = 16, said: list[str] | None = None) -> PaperSweep:
    runner = Runner(rows, "test", (said if said is not None else []).append)
    return PaperSweep(conditions(trajectories), [MATH_8B], arms_named(arms), range(2), runner)


def test_names_of_cells_and_arms() -> None:
    assert len(cells_named("all")) == len(PAPER_CELLS) == 9
    assert cells_named("math,qwen3-8b/math,qwen3-32b/search") == [
        PaperCell("qwen3-14b", "math"),
        MATH_8B,
        PaperCell("qwen3-32b", "math"),
        PaperCell("qwen3-32b", "search"),
    ]
    assert [arm.name for arm in arms_named("heddle-paper,baselines")] == [
        "verl",
        "verl-hybrid",
        "slime",
        "sticky-least-loaded",
        "heddle-paper",
    ]
    assert {arm.predictor for arm in arms_named("baselines")} == {""}
    assert [arm.predictor for arm in arms_named("ours")] == [
        "xgboost",
        "oracle",
        "xgboost",
        "oracle",
    ]
    assert {arm.predictor for arm in arms_named("ablations")} == {"oracle"}
    for wrong in (cells_named, arms_named):
        with pytest.raises(BadInput, match="cooking"):
            wrong("cooking")
        with pytest.raises(BadInput, match="names nothing"):
            wrong(" ,")


def test_the_amount_is_the_papers_batch_of_100_for_each_engine_of_a_baseline() -> None:
    whole = PaperConditions("hopper64", Cluster(gpus=64), None, 16, 40_960)
    assert whole.drawn(MATH_8B).trajectories == 6400
    assert whole.drawn(PaperCell("qwen3-32b", "math")).trajectories == 3200
    assert conditions(None).drawn(MATH_8B).trajectories == 400


def test_engines_as_text() -> None:
    assert engines_text((1, 8, 1, 4)) == "1x8+1x4+2x1"


def test_a_model_is_only_run_where_it_fits() -> None:
    hopper = Cluster(gpus=64)
    assert tuple(fleets_that_fit(model_of("qwen3-8b"), hopper, 40_960)) == (1, 2, 4, 8)
    assert tuple(fleets_that_fit(model_of("qwen3-32b"), hopper, 40_960)) == (2, 4, 8)
    with pytest.raises(BadInput, match="fits no engine"):
        fleets_that_fit(model_of("qwen3-32b"), Cluster(gpus=1), 40_960)


def test_works_of_an_exact_predictor_are_exact_and_those_of_a_vague_one_have_its_spread() -> None:
    plans = synthesize("coding", prompts=50, samples=16, seed=1)
    earlier = synthesize("coding", prompts=50, samples=16, seed=2)
    known = {plan.trajectory_id: float(plan.generated_tokens) for plan in plans}
    exact = predicted_works(plans, Oracle(KnownWork(known)), earlier, 131_072)
    assert [work.decode_tokens for work in exact] == [plan.generated_tokens for plan in plans]
    assert {work.group for work in exact} == {plan.group_id for plan in plans}
    added = sum(work.prefill_tokens for work in exact) / sum(work.decode_tokens for work in exact)
    seen = sum(plan.context_tokens - plan.prompt_tokens for plan in earlier)
    sampled = sum(plan.generated_tokens for plan in earlier)
    assert added == pytest.approx(seen / sampled - 1)
    # Equal lengths except for the quantile: a tenth lies above the 0.9 quantile, half above the median.
    equal = dict.fromkeys(known, 1000.0)
    vague = predicted_works(plans, NoisyOracle(KnownWork(equal), error=2.0), earlier, 131_072)
    made = NoisyOracle(KnownWork(equal), error=2.0).predict([])
    assert made == []
    assert len({work.decode_tokens for work in vague}) == len(plans)
    assert max(work.decode_tokens for work in vague) > 4_000
    short = predicted_works(plans, Oracle(KnownWork(known)), earlier, 4_000)
    assert all(w.shared_tokens + w.decode_tokens + w.prefill_tokens <= 4_000 for w in short)


def test_the_chosen_degrees_are_predicted_to_be_no_later_than_any_uniform_one() -> None:
    plans = synthesize("math", prompts=20, samples=16, seed=1)
    known = {plan.trajectory_id: float(plan.generated_tokens) for plan in plans}
    works = predicted_works(plans, Oracle(KnownWork(known)), plans, 40_960)
    fleets = fleets_that_fit(model_of("qwen3-8b"), Cluster(gpus=8), 40_960)
    plan = plan_fleet(works, Cluster(gpus=8), fleets, seed=0)
    assert sum(plan.tp_degrees) <= 8
    assert plan.expected_makespan_s is not None
    assert plan.expected_makespan_s <= min(seconds for _, seconds in plan.uniform_s if seconds is not None)


def test_a_sweep_runs_every_degree_once_and_later_seeds_at_two() -> None:
    store, said = RowFile(), list[str]()
    sweep(store, "verl,slime,heddle-oracle", said=said).play()
    rows = store.rows("run")
    assert len(said) == len(rows) + len(store.rows("degrees"))
    verl = [row["engines"] for row in rows if (row["arm"], row["seed"]) == ("verl", 0)]
    assert sorted(verl) == ["1x4", "2x2", "4x1"]
    results = PaperResults(rows, store.rows("degrees"))
    best = results.best_degree(MATH_8B, "verl")
    assert best is not None
    later = {row["engines"] for row in rows if (row["arm"], row["seed"]) == ("verl", 1)}
    assert later == {"4x1", f"{4 // best}x{best}"}
    assert [row["predictor"] for row in store.rows("degrees")] == ["oracle", "oracle"]
    assert len(results.chosen(MATH_8B, "heddle-oracle")) == 2
    assert all(0 < row["bound_share"] <= 1 and row["code"] == "test" for row in rows)


def test_only_chosen_degrees_leave_the_uniform_ones_to_the_baselines() -> None:
    store = RowFile()
    arms = arms_named("slime,heddle-oracle,fcfs")
    runner = Runner(store, "test", lambda line: None)
    PaperSweep(conditions(), [MATH_8B], arms, [0], runner, only_chosen=True).play()
    assert len(store.rows("run")) == 3 + 1 + 1
    (chosen,) = store.rows("degrees")
    assert {row["engines"] for row in store.rows("run") if row["arm"] != "slime"} == {chosen["engines"]}


def test_a_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    (slime,) = arms_named("slime")
    first = [paper_run(conditions(), MATH_8B, 0, slime, degrees) for degrees in ((1,) * 4, (2, 2))]
    kept = Runner(RowFile(path), "test", lambda line: None).played(first, str)
    assert [json.loads(line) for line in path.read_text().splitlines()] == kept
    with path.open("a") as file:
        file.write('{"kind": "run", "mod')  # killed while it wrote
    store, said = RowFile(path), list[str]()
    store.check_writable()
    sweep(store, "slime", said=said).play()
    rows = store.rows("run")
    assert len(said) == len(rows) - 2 and " on 1x4, seed 0: " in said[0]
    assert path.read_text().count("\n") == len(rows)
    again, nothing = RowFile(path), list[str]()
    assert again.rows("run") == rows
    sweep(again, "slime", said=nothing).play()
    assert nothing == []


def test_files_that_are_no_rows_or_of_other_conditions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"kind": "tea"}\n')
    with pytest.raises(BadInput, match="line 1"):
        RowFile(path)
    path.write_text('{"kind": "run", "model": "qwen3-8b"}\n')
    with pytest.raises(BadInput, match="lacks 'workload'"):
        RowFile(path)
    path.unlink()
    sweep(RowFile(path), "slime").play()
    with pytest.raises(BadInput, match="trajectories 16, not 32"):
        sweep(RowFile(path), "slime", trajectories=32)


def made_up(arm: str, engines: str, seed: int, makespan_s: float) -> dict[str, object]:
    base = {"kind": "run", **conditions().key(MATH_8B, seed), "arm": arm, "engines": engines, "code": "x"}
    queued = {f"queue_{figure}_s": 1.0 for figure in ("mean", "p99", "longest")}
    counts = dict.fromkeys(("preemptions", "kv_preemptions", "prefilled_tokens", "cached_tokens"), 10)
    shares = {"bound_share": 0.5, "busy_share_mean": 0.5, "busy_share_least": 0.4, "bound_binding": "path"}
    rest = {"tokens": 100, "tokens_per_s": 100 / makespan_s, "median_finish_s": 1.0, "moves": {}}
    return {**base, "makespan_s": makespan_s, **queued, **counts, **shares, **rest}


def test_tables_say_what_the_rows_say() -> None:
    rows = [
        made_up("verl", "4x1", 0, 200.0),
        made_up("verl", "2x2", 0, 150.0),
        made_up("verl", "4x1", 1, 240.0),
        made_up("verl", "2x2", 1, 140.0),
        made_up("slime", "4x1", 0, 500.0),
        made_up("slime", "4x1", 1, 500.0),
        made_up("heddle", "4x1", 0, 110.0),
        made_up("heddle", "1x2+2x1", 0, 100.0),
        made_up("heddle", "1x2+2x1", 1, 80.0),
        made_up("heddle-oracle", "1x2+2x1", 0, 100.0),
        made_up("fcfs", "1x2+2x1", 0, 120.0),
    ]
    foreseen = {"predicted_s": 90.0, "uniform_s": {"1": 100.0, "2": 95.0}}
    choices = [
        {**made_up("", "1x2+2x1", seed, 1.0), "kind": "degrees", "predictor": name, **foreseen}
        for seed in (0, 1)
        for name in ("xgboost", "oracle")
    ]
    results = PaperResults(rows, choices)
    assert ratios(rows[1:2], rows[7:9]) == [1.5]
    assert results.best_baseline(MATH_8B) == "verl"
    text = "\n".join(all_tables(results))
    assert (
        "| heddle | qwen3-8b/math | 1x2+2x1 | TP 1 | 2.50 (2.00-3.00) above | - | 5.62 (5.00-6.25) above | - |" in text
    )
    assert "1.62 (1.50-1.75) at 2" in text and "| verl | 50% | 1.62 (1.50-1.75) |" in text
    assert "1.20 inside" in text, "the ablation has one seed"
    assert "| qwen3-8b/math | verl | 200 | 150 |" in text
    assert "| qwen3-8b/math | heddle | 0 | 1x2+2x1 | 90 | 95 at 2 | 100 | 110 at 1 |" in text
    assert "nan" not in text
    assert set(main_tables(results)) <= set(all_tables(results))
    other = {**rows[0], "trajectories": 20, "seed": 2}
    with pytest.raises(BadInput, match="two conditions"):
        PaperResults([*rows, other], choices)


def invoke(*arguments: object) -> Result:
    group = OneLineGroup("heddle")
    assert isinstance(group, click.Group)
    group.add_command(paper)
    return CliRunner().invoke(group, ["paper", *map(str, arguments)])


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text("gpus = 4\ngpus-per-node = 4\n")
    where = ("--cluster", "small.toml", "--samples", "4", "--max-context-tokens", str(CONTEXT))
    return (*where, "--cells", "qwen3-8b/math", "--trajectories", "16", "--out", "runs.jsonl")


def test_the_command_runs_prints_and_prints_again(small: tuple[str, ...]) -> None:
    result = invoke(*small, "--arms", "slime,heddle-oracle", "--seeds", 1, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    assert len(result.stdout.splitlines()) == 1
    made = json.loads(result.stdout)
    assert {row["arm"] for row in made["rows"]} == {"slime", "heddle-oracle"}
    assert made["cells"][0]["best_baseline"] == "slime"
    assert "of the bound" in result.stderr and " left\n" in result.stderr
    again = invoke(*small, "--arms", "slime,heddle-oracle", "--seeds", 1, "--json")
    assert json.loads(again.stdout) == made
    assert " left\n" not in again.stderr
    printed = invoke("--out", "runs.jsonl", "--markdown")
    assert printed.exit_code == 0
    assert "### qwen3-8b/math" in printed.stdout and "| slime | 4x1 |" in printed.stdout
    lines = Path("runs.jsonl").read_text().replace(f'"{code_digest(DECIDING)}"', '"other"')
    Path("runs.jsonl").write_text(lines)
    assert "made by other code" in invoke(*small, "--arms", "slime", "--seeds", 1).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cells", "qwen3-8b/tea"), "--cells qwen3-8b/tea"),
        (("--arms", "best"), "--arms best"),
        (("--cluster", "hopper63"), "hopper63"),
        (("--trajectories", "30"), "no multiple of 16"),
        (("--markdown",), "give --out FILE"),
        (("--out", "no/such/runs.jsonl"), "no/such/runs.jsonl"),
        (("--cells", "qwen3-14b", "--max-context-tokens", "400000"), "paper's degree 1"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == "" and len(result.stderr.splitlines()) == 1
    assert said in result.stderr


@pytest.mark.slow
@pytest.mark.long
def test_two_hash_seeds_give_the_same_report(small: tuple[str, ...]) -> None:
    script = "import sys; from benchmarks.commands.paper import paper; paper(sys.argv[1:])"
    arguments = [*small[:-1], "{}.jsonl", "--arms", "verl-hybrid,heddle-oracle,heddle-paper", "--seeds", "1"]
    outputs = []
    for hash_seed in ("1", "2"):
        paths = os.pathsep.join(sys.path)
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        named = [argument.format(hash_seed) for argument in arguments]
        done = subprocess.run(
            [sys.executable, "-c", script, *named, "--json"], env=environment, capture_output=True, check=True
        )
        outputs.append((done.stdout, Path(f"{hash_seed}.jsonl").read_bytes()))
    assert outputs[0] == outputs[1]
