"""The search of the best simple rule: which limits it tries, and that it reports on seeds that it did not search."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import log
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.commands.paper import paper
from benchmarks.paper.best_rule import BestRules, best_rule_tables
from benchmarks.paper.rule_search import ROUTERS, RuleSearch, SimpleRule
from benchmarks.paper.sweep import PaperCell, PaperConditions, cells_named
from benchmarks.row_file import RowFile
from benchmarks.runner import Runner
from heddle_dask.cli.one_line import OneLineGroup
from heddle_dask.core.errors import BadInput
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.sweep import parse_arms
from heddle_dask.strategies.presets import PRESETS, Strategy

EXACT = "heddle-deadline:predictor=oracle"
CELL = PaperCell("qwen3-8b", "math")
CONDITIONS = PaperConditions("small", Cluster(gpus=2, gpus_per_node=2), 8, 4, 8_192)


def valley(best: int, width: float = 0.3) -> Callable[[SimpleRule, int], float]:
    """Makespans that grow with the distance of the limit from the best, and a little with the degree."""

    def seconds(rule: SimpleRule, seed: int) -> float:
        if rule.probing:
            return 500.0 + seed / 100
        away = abs(log((rule.alive or 1600) / best))
        return 100 + 100 * width * away + rule.tp_degree + 0.01 * seed + 2 * ROUTERS.index(rule.router)

    return seconds


def test_a_rule_is_an_arm() -> None:
    assert SimpleRule("verl", 4).arm == "verl"
    assert SimpleRule("verl", 4, 300).arm == "verl:admission=at-most,alive=300"
    assert SimpleRule("verl", 4, probing=True).arm == "verl:admission=additive-increase"
    assert {*ROUTERS} <= {*PRESETS}
    for router in ROUTERS:
        assert Strategy(router, ["admission=at-most,alive=3"])


@settings(deadline=None, max_examples=60)
@given(best=st.integers(60, 1600))
def test_in_a_valley_the_limit_is_found_within_a_fifth(best: int) -> None:
    """The last step is a factor of 1.19."""
    rule = RuleSearch(ROUTERS, (1, 4), 1600, (7, 8)).best(valley(best))[0]
    assert (rule.router, rule.tp_degree) == (ROUTERS[0], 1)
    assert best / 1.2 <= (rule.alive or 1600) <= best * 1.2


@settings(deadline=None, max_examples=60)
@given(st.randoms(use_true_random=False))
def test_no_rule_that_was_tried_on_the_first_seed_alone_beats_the_kept_ones_there(drawn: object) -> None:
    seen: dict[tuple[SimpleRule, int], float] = {}

    def seconds(rule: SimpleRule, seed: int) -> float:
        return seen.setdefault((rule, seed), drawn.random())  # type: ignore[attr-defined]

    found = RuleSearch(("verl", "slime", "sticky-least-loaded"), (1, 2), 64, (5,)).best(seconds)
    assert len({(rule.router, rule.tp_degree, rule.probing) for rule in found}) == len(found) == 2
    assert [seen[rule, 5] for rule in found] == sorted(seen[rule, 5] for rule in found)
    assert seen[found[0], 5] == min(seen.values()), "with one seed: the best of all that was tried"


def test_limits_halve_until_two_in_a_row_gain_nothing_and_other_routers_start_from_the_best() -> None:
    tried: list[SimpleRule] = []

    def seconds(rule: SimpleRule, seed: int) -> float:
        if seed == 1 and not rule.probing and rule not in tried:
            tried.append(rule)
        return valley(400)(rule, seed)

    RuleSearch(("verl", "slime"), (1,), 1600, (1, 2)).best(seconds)
    limits = {name: [rule.alive for rule in tried if rule.router == name] for name in ("verl", "slime")}
    assert limits["verl"][:5] == [800, None, 400, 200, 100]
    assert limits["slime"][:4] == [None, 400, 200, 800]
    assert 566 in limits["verl"] and 283 in limits["verl"], "refined"


def test_a_hopeless_router_is_not_searched_further() -> None:
    tried: set[SimpleRule] = set()

    def seconds(rule: SimpleRule, seed: int) -> float:
        tried.add(rule)
        return valley(400)(rule, seed) * (3 if rule.router == "slime" else 1)

    RuleSearch(("verl", "autellix", "slime"), (1,), 1600, (1,)).best(seconds)
    assert {rule.alive for rule in tried if rule.router == "slime"} == {None, 400}


def search(store: RowFile, said: list[str] | None = None, **more: object) -> BestRules:
    options: dict[str, object] = {"search_seeds": (1, 2), "seeds": (3, 4), "degrees": (2,)}
    options |= {"routers": ("verl", "sticky-least-loaded"), **more}
    runner = Runner(store, "test", (said if said is not None else []).append)
    return BestRules(CONDITIONS, [CELL], parse_arms(EXACT), runner, **options)  # type: ignore[arg-type]


def test_it_reports_on_seeds_that_were_not_searched_and_runs_nothing_twice(tmp_path: Path) -> None:
    store = RowFile(tmp_path / "rows.jsonl")
    (found,) = search(store).results()
    assert all([row["seed"] for row in rows] == [3, 4] for rows in found.rows)
    assert [row["seed"] for row in found.ours[EXACT]] == [3, 4]
    searched = {row["arm"] for row in store.rows("run") if row["seed"] == 1}
    assert {
        "verl",
        "sticky-least-loaded:admission=additive-increase",
        "verl:admission=at-most,alive=4",
    } <= searched
    assert not any("heddle" in arm for arm in searched), "one degree needs no search"
    rows = len(store.rows("run"))
    said: list[str] = []
    assert list(search(RowFile(tmp_path / "rows.jsonl"), said).results()) == [found] and said == []
    assert len(store.rows("run")) == rows == len((tmp_path / "rows.jsonl").read_text().splitlines())
    lines = list(best_rule_tables([found]))
    assert lines[2].startswith(f"| qwen3-8b/math | 1. `{found.rules[0].arm}` | 1x2 | ")
    assert lines[-1].startswith(f"| qwen3-8b/math | `{EXACT}` | 1x2 | ")


def test_a_form_of_heddle_gets_its_best_degree_of_the_search_seeds() -> None:
    store = RowFile()
    (found,) = search(store, degrees=(), routers=("verl",)).results()
    ran = {(row["engines"], row["seed"]) for row in store.rows("run") if row["arm"].startswith("heddle")}
    assert {("2x1", 1), ("2x1", 2), ("1x2", 1), ("1x2", 2)} <= ran
    assert len({row["engines"] for row in found.ours[EXACT]}) == 1 and len(ran) == 6


def test_seeds_are_searched_or_reported_and_degrees_must_fit() -> None:
    with pytest.raises(BadInput, match="seed 2 is both searched and reported"):
        search(RowFile(), seeds=(2, 3))
    with pytest.raises(BadInput, match="--degrees: qwen3-8b fits at 1, 2"):
        search(RowFile(), degrees=(8,))


def test_the_memory_short_cell_is_a_trace_beside_the_cells_of_the_paper() -> None:
    (cell,) = cells_named("qwen3-14b/memory-short")
    drawn = PaperConditions("small", Cluster(gpus=2), 32, 16, 131_072).drawn(cell)
    assert (drawn.name, drawn.trajectories, drawn.samples) == ("claude_code_transcripts", 32, 1)
    assert not any(each.workload == "memory-short" for each in cells_named("all"))


def invoke(*args: object) -> Result:
    return CliRunner().invoke(OneLineGroup(commands={"paper": paper}), ["paper", *map(str, args)])


def test_the_command(tmp_path: Path) -> None:
    cluster = tmp_path / "two.toml"
    cluster.write_text('gpus = 2\ngpus-per-node = 2\ngpu = "h100"\n')
    common = ["--best-rule", "--cells", "qwen3-8b/math", "--cluster", cluster, "--max-context-tokens", 8192]
    small = ["--trajectories", 8, "--samples", 4, "--seeds", 1, "--search-seeds", 1, "--degrees", 2]
    small += ["--routers", "verl,autellix"]
    result = invoke(*common, *small, "--arms", EXACT, "--json")
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert [cell["workload"] for cell in body["cells"]] == ["math"]
    assert len(body["cells"][0]["gains"][EXACT]) == 1
    assert {row["seed"] for row in body["rows"]} == {0, 100}
    assert {row["arm"].split(":")[0] for row in body["rows"]} == {"verl", "autellix", EXACT.split(":")[0]}
    for wrong, message in (
        (["--degrees", "x"], "--degrees x: give TP degrees"),
        (["--routers", "heddle"], "--routers heddle: give sticky-least-loaded"),
        (["--search-seed", 0], "seed 0 is both searched and reported"),
        (["--markdown"], "--best-rule runs here and prints its own table"),
    ):
        result = invoke(*common, *small, *wrong)
        assert result.exit_code != 0 and message in result.output
