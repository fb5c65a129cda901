"""Settings of Dask's configuration: defaults of the Python API, below what the caller gives."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import dask.config
import pytest

from heddle_dask import BadInput, Budget, Engines, EngineSpec, Patience, Sampling, Strategy, Telemetry
from heddle_dask.cli.field_options import Asked, settings_by_option
from heddle_dask.live.driver.inputs.rollout_inputs import strategy_of

ROOT = Path(__file__).parents[2]


def test_without_settings_the_classes_own_the_defaults() -> None:
    with dask.config.set({"heddle": {}}):
        for kind in (Budget, Sampling, Patience, Engines):
            made = kind()
            assert {f.name: getattr(made, f.name) for f in fields(kind) if isinstance(f.default, int | float)} == {
                f.name: f.default for f in fields(kind) if isinstance(f.default, int | float)
            }
        assert strategy_of(None) == Strategy()


def test_settings_are_defaults_and_arguments_win() -> None:
    settings = {
        "heddle.budget.max_steps": 7,
        "heddle.budget.tool-timeout-s": 5,
        "heddle.sampling.temperature": 0.5,
        "heddle.patience.workers_s": 3.0,
        "heddle.engines": {"kind": "emulated", "slots": 3},
        "heddle.strategy": "heddle",
    }
    with dask.config.set(settings):
        assert (Budget().max_steps, Budget().tool_timeout_s) == (7, 5)
        assert Budget(8).max_steps == Budget(max_steps=8).max_steps == 8
        assert Budget(8).tool_timeout_s == 5
        assert Sampling().temperature == 0.5
        engines = Engines.of(None)
        assert (engines.kind, engines.slots, engines.patience.workers_s) == ("emulated", 3, 3.0)
        assert Engines.of("vllm").kind == "vllm"
        assert strategy_of(None).preset == "heddle"
        assert strategy_of("slime").preset == "slime"
        budget = Budget(max_steps=9)
    # Later constructions are of what was made, not of what is set then.
    assert pickle.loads(pickle.dumps(budget)) == budget
    assert replace(budget, max_steps=10).tool_timeout_s == 5
    assert Budget().max_steps != 7


def test_a_whole_spec_stands_in_place_of_the_settings(model_dir: str) -> None:
    spec = EngineSpec(kind="emulated", model=model_dir, max_model_len=64, slots=6)
    with dask.config.set({"heddle.engines.slots": 3, "heddle.engines.kind": "vllm"}):
        assert Engines.of(spec).spec == spec


@pytest.mark.parametrize(
    ("key", "value", "make"),
    [
        ("heddle.budget.max_steps", 0, Budget),
        ("heddle.budget.max_steps", "many", lambda: Budget(max_step_tokens=8)),
        ("heddle.budget.max_stepz", 3, Budget),
        ("heddle.budget", 3, Budget),
        ("heddle.budgets", {"max_steps": 3}, Budget),
        ("heddle.sampling.top_p", 2.0, Sampling),
        ("heddle.patience.engines_s", -1, Engines),
        ("heddle.engines.slots", 0, Engines),
        ("heddle.engines.kind", "vlmm", Engines),
        ("heddle.engines.spec", {}, Engines),
        ("heddle.strategy", "hedle", lambda: strategy_of(None)),
        ("heddle.strategy", 3, lambda: strategy_of(None)),
    ],
)
def test_a_bad_setting_is_named_by_its_key(key: str, value: object, make: Callable[[], Any]) -> None:
    with dask.config.set({key: value}), pytest.raises(BadInput) as refused:
        make()
    assert key in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_bad_argument_is_not_blamed_on_the_settings() -> None:
    with dask.config.set({"heddle.budget.max_steps": 7}), pytest.raises(BadInput) as refused:
        Budget(max_step_tokens=0)
    assert str(refused.value).startswith("budget: max_step_tokens is 0")


# -- the command line ------------------------------------------------------------------------------------


def heddle(*arguments: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from heddle_dask.cli.main import main; main()", "rollout", *arguments],
        cwd=ROOT,
        env=os.environ | {"DASK_CONFIG": str(home)} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_option_with_a_setting_is_an_option_and_a_field() -> None:
    from heddle_dask.cli.rollout.command import rollout

    sections = {"budget": Budget, "engines": Engines, "patience": Patience, "sampling": Sampling}
    kinds = {**sections, "otel": Telemetry}
    options = {option.name for option in rollout.params}
    for option, (section, name) in settings_by_option().items():
        assert option in options
        assert name in {each.name for each in fields(kinds[section])}


def test_every_field_that_the_command_line_fills_has_its_setting_there() -> None:
    """`heddle rollout` gives these fields itself: without an entry it would hide what the user has set."""
    there = set(settings_by_option().values())
    assert {("patience", each.name) for each in fields(Patience)} <= there
    assert {("sampling", each.name) for each in fields(Sampling)} <= there
    # No option fills the limits of one action, so `Budget` takes them from the settings; retries have none.
    without = {"max_action_bytes", "max_action_disk_bytes", "max_action_processes", "retries"}
    assert {("budget", each.name) for each in fields(Budget) if each.name not in without} <= there


def test_the_page_of_settings_names_the_keys_of_the_engines() -> None:
    """Of the other sections it says: every field."""
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| `heddle.engines` |")]
    keys = [name for section, name in settings_by_option().values() if section == "engines"]
    assert row.split("|")[2].strip() == ", ".join(f"`{key}`" for key in keys)


def test_the_command_line_takes_settings_from_files_and_variables(tmp_path: Path) -> None:
    file = "heddle:\n  budget:\n    max-steps: 7\n  strategy: heddle\n  engines: {kind: emulated}\n"
    (tmp_path / "heddle.yaml").write_text(file, encoding="utf-8")
    shown = heddle("--help", home=tmp_path, DASK_HEDDLE__SAMPLING__TEMPERATURE="0.25")
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    for default in (
        "LLM steps per trajectory. [default: 7;",
        "Preset. [default: heddle]",
        "[default: emulated]",
        "0.25",
    ):
        assert default in text, default


def test_a_bad_setting_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    refused = heddle("--engine", "emulated", home=tmp_path, DASK_HEDDLE__BUDGET__MAX_STEPS="none")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "heddle.budget.max_steps" in line


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ([], None),
        (["--engines", "3"], 3),
        (["--config"], 4),
        (["settings"], 5),
        (["--engines", "3", "--config"], 3),
    ],
)
def test_engines_of_an_existing_cluster_are_waited_for_wherever_their_number_is_given(
    arguments: list[str], count: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from heddle_dask.cli.rollout import run
    from heddle_dask.cli.rollout.command import rollout

    made: list[run.RolloutRun] = []

    def keep(asked: Asked, *, to_stderr: bool) -> run.Outcome:
        made.append(run.RolloutRun(asked, run.ProgressDisplay(run.SafeConsole(stderr=True))))
        return run.Outcome({}, 0)

    monkeypatch.setattr(run, "run_rollout", keep)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "c.toml"
    file.write_text("engines = 4\n", encoding="utf-8")
    settings = {"count": 5} if arguments == ["settings"] else {}
    options = [part for part in arguments if part != "settings"] + [str(file)] * ("--config" in arguments)
    with dask.config.set({"heddle.engines": {"kind": "emulated", **settings}}):
        result = CliRunner().invoke(rollout, ["--scheduler", "tcp://127.0.0.1:9", *options])
    assert result.exit_code == 0, result.output
    assert made[0].engines.count == count
