"""From the simulator to the user: rollouts and their figures, clusters, sweeps, the command and its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.dom.minidom
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from heddle_dask.cli.one_line import OneLineGroup
from heddle_dask.cli.simulate import simulate as simulate_command
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import engine_cost_for
from heddle_dask.cost.measured import DecodePoint, MeasuredTable, TokensPoint
from heddle_dask.cost.published import model_of
from heddle_dask.sim.clusters import CLUSTERS, Cluster, cluster_of, with_choices
from heddle_dask.sim.rollout import means, simulate
from heddle_dask.sim.sweep import SimulatedWorkload, parse_arms
from heddle_dask.views.drawing.svg import Line, line_chart

SMALL = ("--cluster", "small.toml", "--trajectories", "32", "--samples", "4", "--max-context-tokens", "20000")
WORK = SimulatedWorkload("coding", 32, 4, 20_000)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text('gpus = 4\ngpus-per-node = 4\ntp = [2, 1, 1]\nslots = 8\ngpu = "H100"\n')


def invoke(*arguments: object) -> Result:
    group = OneLineGroup("heddle")
    assert isinstance(group, click.Group)
    group.add_command(simulate_command)
    return CliRunner().invoke(group, ["simulate", *map(str, arguments)])


def refused(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def small_rollout(preset: str, *overrides: str, watched: bool = False):  # type: ignore[no-untyped-def]
    fleet = cluster_of("small.toml").fleet("qwen3-8b", max_context_tokens=20_000)
    return simulate(preset, overrides, fleet, WORK.drawn(0), seed=0, watched=watched)


def test_a_rollout_gives_its_figures() -> None:
    run = small_rollout("heddle", "predictor=oracle", watched=True)
    assert run.trajectories == 32
    assert run.tokens == sum(plan.generated_tokens for plan in WORK.drawn(0))
    assert run.makespan_s == max(run.finished_s)
    assert 0 < run.bound_share <= 1
    assert all(0 < share <= 1 for share in run.busy_shares.values())
    assert run.prefilled_tokens > 0 and run.cached_tokens > 0
    figures = run.figures()
    for name in ("strategy", "seed", "trajectories", "tokens", "makespan_s", "tokens_per_s", "bound_s"):
        assert name in figures
    assert "cpu_s" not in figures
    assert figures == small_rollout("heddle", "predictor=oracle").figures()


def test_the_timeline_ends_with_nothing_running() -> None:
    run = small_rollout("slime", watched=True)
    assert run.timeline is not None
    assert run.timeline.active[-1][1] == 0
    assert max(number for _, number in run.timeline.active) == 32
    assert sorted(run.timeline.running) == sorted(run.busy_shares)
    for curve in run.timeline.running.values():
        assert curve[-1][1] == 0
        assert 0 < max(number for _, number in curve) <= 8


def test_means_of_a_step_curve() -> None:
    curve = [(0.0, 0), (1.0, 4), (3.0, 2)]
    assert means(curve, 4.0, 4) == [0.0, 4.0, 4.0, 2.0]
    assert means(curve, 4.0, 2) == [2.0, 3.0]
    assert means(curve, 0.0, 2) == [0.0, 0.0]


def test_a_warm_predictor_has_learnt_from_other_groups() -> None:
    others = WORK.others(0)
    assert len(others) == 1600
    here = {plan.group_id for plan in WORK.drawn(0)}
    assert not here & {plan.group_id for plan in others}
    fleet = cluster_of("small.toml").fleet("qwen3-8b", max_context_tokens=20_000)
    few, plans = others[:40], WORK.drawn(0)
    warm = simulate("heddle", (), fleet, plans, seed=0, warm=few)
    cold = simulate("heddle", (), fleet, plans, seed=0)
    assert warm.tokens == cold.tokens
    assert warm.finished_s != cold.finished_s


def test_the_others_of_a_trace_are_groups_that_were_not_drawn() -> None:
    work = SimulatedWorkload("intercode", 40, 1, 32_768)
    others = work.others(0)
    drawn = {plan.group_id.rpartition("~")[0] for plan in work.drawn(0)}
    names = [plan.group_id.removeprefix("earlier ").rpartition("~")[0] for plan in others]
    assert others and not drawn & set(names)
    ids = [plan.trajectory_id.rpartition("~")[0] for plan in others]
    assert len(set(ids)) == len(ids)


def test_named_clusters() -> None:
    fleet = CLUSTERS["hopper64"].fleet("qwen3-14b", max_context_tokens=40_960)
    assert len(fleet.engines) == 64
    assert fleet.engines[0][0].slots == 100
    four = with_choices(CLUSTERS["hopper8"], tp=4, slots=30).fleet("qwen3-32b", max_context_tokens=40_960)
    assert [(spec.tp_degree, spec.slots) for spec, _ in four.engines] == [(4, 30), (4, 30)]
    # Inside a node KV travels by NVLink.
    assert four.link.token_s < fleet.link.token_s / 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpus = 8\ngpu = 'h1000'", "h1000"),
        ("gpus = 0", "gpus is 0"),
        ("gpu = 'h100'", "lacks 'gpus'"),
        ("gpus = 8\nslot = 3", "did you mean 'slots'"),
        ("gpus = 8\ntp = []", "empty"),
        ("gpus = 8\ntp = 1.5", "tp is 1.5"),
        ("gpus = 8\nstep-added-s = -1", "step-added-s"),
        ("gpus = 8\nkv-transfer = 1", "kv-transfer"),
        ("gpus = 8\nbelieved-gpu = 'a1'", "a1"),
        ("gpus = 8\ntables = 'mine.json'", "list of names or files"),
        ("gpus = 8\nfaults = 3", "section"),
        ("gpus = 8\n[faults]\nwalltime = 3", "did you mean 'walltime-s'"),
        ("gpus = 8\n[faults]\ntool-failure-share = 1.5", "share from 0 to 1"),
        ("gpus = 8\n[faults]\nengine-mtbf-s = -1", "seconds from 0 up"),
        ("gpus = ", "no TOML"),
    ],
)
def test_bad_cluster_files(text: str, said: str) -> None:
    Path("bad.toml").write_text(text)
    with pytest.raises(BadInput, match=said):
        cluster_of("bad.toml")


def measured_8b(name: str, degree: int = 1, slower: float = 2.0) -> None:
    """A table as ``heddle profile`` would write it of an engine so much slower than the formula says."""
    shape = model_of("qwen3-8b")
    cost = engine_cost_for(shape, "h100", degree)
    MeasuredTable(
        model="qwen3-8b",
        shape=shape,
        degree=degree,
        device="a device",
        engine="an engine",
        date="2026-11-23",
        slots=8,
        chunk_tokens=cost.chunk_tokens,
        decode=tuple(
            DecodePoint(batch, batch * 1000, slower * cost.decode_token_s(batch, batch * 1000))
            for batch in (1, 2, 4, 8)
        ),
        prefill=tuple(TokensPoint(tokens, slower * cost.prefill_s(tokens)) for tokens in (500, 1000, 4000)),
        kv_transfer=(TokensPoint(1000, 0.3), TokensPoint(5000, 0.7)),
    ).save(Path(name))


def test_measured_tables_take_the_place_of_the_formula_at_their_degree() -> None:
    measured_8b("mine.json")
    Path("inner").mkdir()
    text = Path("small.toml").read_text()
    measured_8b("two.json", degree=2, slower=1.5)
    tables = '["../mine.json", "../two.json"]'  # beside the file
    Path("inner/measured.toml").write_text(text + f"tables = {tables}\n")
    by_file = cluster_of("inner/measured.toml")
    by_option = with_choices(cluster_of("small.toml"), tp=None, slots=None, tables=("mine.json", "two.json"))
    plain = cluster_of("small.toml").fleet("qwen3-8b", max_context_tokens=20_000)
    for cluster in (by_file, by_option):
        fleet = cluster.fleet("qwen3-8b", max_context_tokens=20_000)
        ratios = [
            cost.decode_token_s(4, 4000) / formula.decode_token_s(4, 4000)
            for (_, cost), (_, formula) in zip(fleet.engines, plain.engines, strict=True)
        ]
        assert ratios == pytest.approx([1.5, 2.0, 2.0], rel=0.05)  # of degrees 2, 1, 1
        assert (fleet.link.setup_s, fleet.link.token_s) == pytest.approx((0.2, 1e-4))
        assert fleet.beliefs[1] == fleet.engines[1][1]
        capacities = [spec.kv_capacity_tokens for spec, _ in fleet.engines]
        assert capacities == [spec.kv_capacity_tokens for spec, _ in plain.engines]
    with pytest.raises(BadInput, match=r"none of the measured tables is of TP degree 2: .* or use 1"):
        replace(by_option, tables=("mine.json",)).fleet("qwen3-8b", max_context_tokens=20_000)
    measured_8b("again.json")
    with pytest.raises(BadInput, match=r"again\.json is the second of TP degree 1"):
        replace(by_option, tables=("mine.json", "again.json")).fleet("qwen3-8b", max_context_tokens=20_000)


def test_a_table_of_another_model_is_refused_in_one_line() -> None:
    measured_8b("mine.json")
    line = refused("--workload", "coding", *SMALL, "--tp", 1, "--model", "qwen3-14b", "--table", "mine.json")
    assert "mine.json is of another model (qwen3-8b" in line and "heddle profile" in line
    assert "none.json" in refused("--workload", "coding", *SMALL, "--table", "none.json")


def test_strategies_may_believe_in_another_gpu_than_there_is() -> None:
    Path("wrong.toml").write_text(Path("small.toml").read_text() + 'believed-gpu = "a100-80g"\n')
    right, wrong = (
        cluster_of(name).fleet("qwen3-8b", max_context_tokens=20_000) for name in ("small.toml", "wrong.toml")
    )
    assert [cost for _, cost in wrong.engines] == [cost for _, cost in right.engines]
    assert sorted(wrong.beliefs) == sorted(right.beliefs) == [1, 2]
    for degree, cost in wrong.beliefs.items():
        assert cost == engine_cost_for("qwen3-8b", "a100-80g", degree) != right.beliefs[degree]


def test_faults_of_a_cluster_file_are_played_and_said() -> None:
    faults = "[faults]\nengine-mtbf-s = 20\nengine-restart-s = 5\ntool-failure-share = 0.1\nwalltime-s = 60\n"
    Path("bad-day.toml").write_text(Path("small.toml").read_text() + faults)
    chosen = ["--workload", "coding", *SMALL, "--model", "qwen3-8b", "--strategy", "slime", "--seeds", "1"]
    chosen[chosen.index("small.toml")] = "bad-day.toml"
    result = invoke(*chosen, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["conditions"]["faults"] == ("tool-failure-share 0.1 walltime-s 60 engine-mtbf-s 20 engine-restart-s 5")
    (row,) = told["rows"]
    assert row["makespan_s"] == 60 and 0 < row["completed"] < row["trajectories"] == 32
    assert f"seed 0: only {row['completed']} of 32 trajectories completed" in result.stderr


def test_a_rollout_that_nobody_completes_is_reported() -> None:
    Path("no-time.toml").write_text(Path("small.toml").read_text() + "[faults]\nwalltime-s = 0.5\n")
    chosen = [
        "--workload",
        "coding",
        *SMALL,
        "--model",
        "qwen3-8b",
        "--strategy",
        "slime,verl",
        "--seeds",
        "1",
    ]
    chosen[chosen.index("small.toml")] = "no-time.toml"
    result = invoke(*chosen, "--html", "page.html", "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [(row["completed"], row["tokens"], row["median_finish_s"]) for row in rows] == [(0, 0, 0.5)] * 2
    page = Path("page.html").read_text()
    for name in ("slime", "verl"):
        said = f"{name}, seed 0: only 0 of 32 trajectories completed; the bound is of all"
        assert said in result.stderr and said in page


def test_who_completes_more_comes_before_who_ends_earlier() -> None:
    """And the page's curve ends where the share of completed ones does."""
    faults = "[faults]\nengine-mtbf-s = 25\nengine-restart-s = 30\n"
    Path("bad-day.toml").write_text('gpus = 8\ngpus-per-node = 8\ntp = 4\nslots = 8\ngpu = "H100"\n' + faults)
    presets = ["slime", "verl", "sticky", "least-load"]
    chosen = ["--workload", "math", *SMALL, "--model", "qwen3-8b", "--strategy", ",".join(presets)]
    chosen[chosen.index("small.toml")] = "bad-day.toml"
    result = invoke(*chosen, "--seeds", "3", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    completed = {name: sum(row["completed"] for row in rows if row["strategy"] == name) for name in presets}
    assert len(set(completed.values())) > 1, "a test of nothing"
    table = [line.split()[0] for line in result.stderr.splitlines() if line.split()[0] in presets]
    assert [completed[name] for name in table] == sorted(completed.values(), reverse=True)


def test_conditions_name_what_scales_the_workload() -> None:
    chosen = [
        "--workload",
        "math",
        *SMALL,
        "--model",
        "qwen3-8b",
        "--strategy",
        "slime",
        "--seeds",
        "1",
        "--json",
    ]
    told = json.loads(invoke(*chosen, "--token-scale", "0.5", "--tool-scale", "2").stdout)["conditions"]
    assert (told["token scale"], told["tool scale"], told["max_context_tokens"]) == (0.5, 2.0, 20_000)
    assert not {"token scale", "tool scale"} & set(json.loads(invoke(*chosen).stdout)["conditions"])


def test_a_predictor_that_nothing_is_left_for_is_not_called_warm() -> None:
    step = {"gen_tokens": 20, "obs_tokens": 5, "tool": "t", "tool_s": 1.0}
    lines = [
        {"id": f"{group}{n}", "group": group, "complete": True, "prompt_tokens": 50, "steps": [step, step]}
        for group in "abc"
        for n in range(3)
    ]
    Path("few.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    work = SimulatedWorkload("few.jsonl", 60, 1, 20_000)
    assert work.warmth(0) == "warm, but every group was drawn: nothing is left to learn from"
    assert WORK.warmth(0) == "warm"


def test_bad_degrees() -> None:
    with pytest.raises(BadInput, match="does not divide a node"):
        Cluster(gpus=8, tp=3).fleet("qwen3-14b", max_context_tokens=1000)
    with pytest.raises(BadInput, match="engines of 12 GPUs on a cluster of 8"):
        Cluster(gpus=8, tp=(8, 4)).fleet("qwen3-14b", max_context_tokens=1000)
    with pytest.raises(BadInput, match="engines of 8 GPUs on a cluster of 4"):
        Cluster(gpus=4, tp=8).fleet("qwen3-14b", max_context_tokens=1000)


def test_strategies_as_they_are_written() -> None:
    arms = parse_arms("heddle:predictor=oracle,error_factor=2:migration=none,verl", ["scheduling=fcfs"])
    assert [arm.name for arm in arms] == ["heddle:predictor=oracle,error_factor=2:migration=none", "verl"]
    assert arms[0].overrides == ("predictor=oracle,error_factor=2", "migration=none", "scheduling=fcfs")
    assert arms[1].overrides == ("scheduling=fcfs",)


def test_the_command_prints_a_table_and_json() -> None:
    arguments = (
        "--workload",
        "math",
        *SMALL,
        "--strategy",
        "slime,verl",
        "--seeds",
        2,
        "--model",
        "qwen3-8b",
    )
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 1
    rows = json.loads(result.stdout)["rows"]
    assert [(row["strategy"], row["seed"]) for row in rows] == [
        ("slime", 0),
        ("verl", 0),
        ("slime", 1),
        ("verl", 1),
    ]
    assert "4/4: verl, seed 1" in result.stderr
    assert all(0 < row["bound_share"] <= 1 for row in rows)
    plain = invoke(*arguments)
    assert {line.split()[0] for line in plain.stdout.splitlines()[2:]} == {"slime", "verl"}


def test_the_page_stands_alone() -> None:
    arguments = ("--workload", "search", *SMALL, "--strategy", "slime,heddle:predictor=oracle", "--seeds", 1)
    result = invoke(*arguments, "--model", "qwen3-8b", "--html", "report.html")
    assert result.exit_code == 0, result.output
    page = Path("report.html").read_text()
    assert page.count("<svg") == 6
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "<script src" not in page
    for title in ("Bound reached", "Active trajectories", "Completed", "Queue time by length", "by engine"):
        assert title in page
    for chart in page.split("<svg")[1:]:
        xml.dom.minidom.parseString("<svg" + chart.partition("</svg>")[0] + "</svg>")


def test_a_chart_of_nothing_is_a_chart() -> None:
    assert "<svg" in line_chart([Line("<none>", [])], x_label="x", y_label="y")
    assert "&lt;none&gt;" in line_chart([Line("<none>", [])], x_label="x", y_label="y")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workload", "cooking"), "cooking"),
        (("--workload", "math", "--cluster", "hopper63"), "hopper63"),
        (("--workload", "math", "--model", "qwen9"), "qwen9"),
        (("--workload", "math", "--strategy", "best"), "unknown strategy 'best'"),
        (("--workload", "math", "--strategy", "verl,verl"), "comes twice"),
        (("--workload", "math", "--strategy", ","), "no strategy"),
        (("--workload", "math", "--set", "order=fcfs"), "unknown part 'order'"),
        (("--workload", "math", "--tp", "3"), "does not divide"),
        (("--workload", "math", "--model", "qwen3-32b", "--tp", "1"), "KV room"),
        (("--workload", "math", "--trajectories", "30"), "no multiple of 16"),
        (("--workload", "math", "--html", "no/such/place.html"), "--html"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(*arguments)


def test_two_hash_seeds_give_the_same_report() -> None:
    script = (
        "from heddle_dask.cli.simulate import simulate; simulate(['--workload', 'math', '--cluster', 'small.toml', "
        "'--trajectories', '16', '--samples', '4', '--max-context-tokens', '20000', '--model', 'qwen3-8b', "
        "'--strategy', 'heddle,heddle:predictor=oracle,verl-hybrid', '--seeds', '1', '--json', '--html', 'page.html'])"
    )
    outputs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
        outputs.append((done.stdout, Path("page.html").read_bytes()))
    assert outputs[0] == outputs[1]
