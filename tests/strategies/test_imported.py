"""Strategies of other packages: named, checked, and never imported because a journal says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from heddle_dask.cli.main import heddle
from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.files.recorded_sessions import recorded_sessions
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.records.journal import Journal
from heddle_dask.sim.rollout import Arm
from heddle_dask.sim.sweep import parse_arms
from heddle_dask.strategies.imported import imported_names
from heddle_dask.strategies.presets import Strategy, build_strategies

MODULE = """
from dataclasses import dataclass

from heddle_dask.core.nouns import Priority


@dataclass(frozen=True)
class Shortest:
    level: int = 0

    def __post_init__(self):
        if self.level < 0:
            raise ValueError(f"level is {self.level}: use 0 or more")

    def priority(self, view, trajectory, step, order):
        return Priority(self.level)


@dataclass
class NoMethods:
    pass


class NoDataclass:
    def priority(self, view, trajectory, step, order):
        return Priority()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_strategies.py").write_text(MODULE)
    (tmp_path / "broken_strategies.py").write_text("raise RuntimeError('of the module')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_strategies", "broken_strategies"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "my_strategies"


def test_a_strategy_of_another_package_is_built_with_its_options(module: str) -> None:
    built = build_strategies("heddle", overrides=[f"scheduling={module}:Shortest,level=2"])
    assert (type(built.scheduling).__name__, built.scheduling.level) == ("Shortest", 2)  # type: ignore[attr-defined]
    Strategy("heddle", [f"scheduling={module}:Shortest"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scheduling=my_strategies:Nothing", "cannot be imported in this process: AttributeError"),
        ("scheduling=no_such_module:Shortest", "cannot be imported in this process: ModuleNotFoundError"),
        ("scheduling=broken_strategies:Shortest", "RuntimeError: of the module"),
        ("scheduling=my_strategies:NoDataclass", "is no dataclass"),
        ("scheduling=my_strategies:NoMethods", "has no method 'priority'"),
        ("placement=my_strategies:Shortest", "has no method 'choose_engine'"),
        ("predictor=my_strategies:Shortest", "a predictor cannot be imported"),
        ("scheduling=my_strategies:Shortest,width=2", "has no option 'width'; its options: level"),
        ("scheduling=my_strategies:Shortest,level=-1", "level is -1: use 0 or more"),
    ],
)
def test_what_is_no_strategy_is_one_line(module: str, override: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as error:
        build_strategies("heddle", overrides=[override])
    assert "\n" not in str(error.value)


def test_an_arm_may_name_a_class(module: str) -> None:
    text = f"heddle:predictor=oracle:scheduling={module}:Shortest,level=1:migration=none"
    overrides = ("predictor=oracle", f"scheduling={module}:Shortest,level=1", "migration=none")
    assert Arm.parse(text) == Arm(text, "heddle", overrides)
    assert [arm.preset for arm in parse_arms(f"{text},verl")] == ["heddle", "verl"]
    assert imported_names(overrides) == [f"{module}:Shortest"]


def test_simulate_finds_a_strategy_of_the_working_directory(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    options = "--workload search --cluster hopper8 --tp 4 --trajectories 16 --seeds 1 --cold --strategy heddle"
    ended = CliRunner().invoke(
        heddle,
        ["simulate", *options.split(), "--set", f"scheduling={module}:Shortest"],
        catch_exceptions=False,
    )
    assert ended.exit_code == 0
    assert "heddle" in ended.output


def test_a_journal_does_not_import_a_strategy_by_itself(module: str, tmp_path: Path) -> None:
    run = tmp_path / "r.zarr"
    facts = {
        "strategy": "heddle",
        "overrides": ["predictor=none", "scheduling=my_strategies:Shortest"],
        "seed": 0,
        "cost": None,
    }
    with Journal.create(journal_path(run)) as journal:
        journal.append("session", facts)
    with pytest.raises(BadInput, match=r"names the strategy my_strategies:Shortest: give --import-strategies"):
        recorded_sessions(run)
    assert module not in sys.modules
    (session,) = recorded_sessions(run, import_strategies=True)
    assert session.facts["overrides"] == facts["overrides"]
