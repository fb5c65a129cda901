"""The terminal's picture of a snapshot: every line fits, with ten trajectories and with ten thousand."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console

from heddle_dask.cli.top.screen import bars_of, rates_of, screen, shortened
from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import ActionId, EngineId, GroupId, HostId, StepId, TrajectoryId
from heddle_dask.core.nouns import (
    NORMAL,
    ActionRequest,
    EngineDescription,
    HostDescription,
    StepRequest,
    TrajectorySpec,
)
from heddle_dask.core.resources import Resources
from heddle_dask.views.history.history_pictures import picture_of
from heddle_dask.views.history.run_history import RunHistory
from heddle_dask.views.history.run_shares import RunShare


def rollout(trajectories: int, engines: int, name: str = "math-{}/0") -> RunHistory:
    """A session with that many trajectories, of which a fourth generates, acts, has failed, and waits."""
    history = RunHistory()
    for number in range(engines):
        description = EngineDescription(EngineId(f"e{number}"), 16, 4096, 1, 65_536)
        history.take(ev.EngineJoined(0.1, description), [])
    history.take(ev.HostJoined(0.2, HostDescription(HostId("h"), Resources.of(cpus=8))), [])
    for number in range(trajectories):
        trajectory = TrajectoryId(name.format(number))
        at = 1 + number / 100
        spec = TrajectorySpec(trajectory, GroupId("g"))
        admitted = [cmd.AdmitTrajectory(trajectory)] if number % 4 else []
        history.take(ev.TrajectorySubmitted(at, spec), admitted)
        step = StepId(trajectory, 0, 0)
        if number % 4 == 1:
            start = cmd.StartStep(step, EngineId(f"e{number % engines}"), NORMAL, number)
            history.take(ev.StepRequested(at + 0.1, StepRequest(step, 100, 50)), [start])
            history.take(ev.StepStarted(at + 0.2, step, start.engine_id), [])
        elif number % 4 == 2:
            action = ActionRequest(ActionId(f"{trajectory}/a"), trajectory, "tool", "run_python")
            history.take(ev.ActionRequested(at + 0.1, action), [])
        elif number % 4 == 3:
            history.tell_end(trajectory, "agent", None, "KeyError: 'x'")
            history.take(ev.TrajectoryEnded(at + 0.1, trajectory, "failed"), [])
    return history


def picture(history: RunHistory) -> dict[str, Any]:
    return picture_of(history, session="s1", is_open=True, strategy="heddle", now_s=history.at_s + 1).as_json()


def drawn(snapshot: dict[str, Any], height: int, width: int) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO())
    console.print(screen(snapshot, height, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("trajectories", "engines"), [(0, 0), (10, 2), (10_000, 64)])
@pytest.mark.parametrize(("height", "width"), [(24, 80), (50, 120)])
def test_the_picture_fits_the_terminal(trajectories: int, engines: int, height: int, width: int) -> None:
    history = rollout(trajectories, engines) if engines else RunHistory()
    lines = drawn(picture(history), height, width)
    assert len(lines) <= height and max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "heddle top" in lines[0]
    if not engines:
        assert "engines: none" in text and "no trajectory is there" in text
        return
    live = sum(number % 4 in (1, 2) for number in range(trajectories))
    failed = sum(number % 4 == 3 for number in range(trajectories))
    assert f"live {live:,} · ended {failed:,} of {trajectories:,} (failed {failed:,})" in text
    assert f"{failed:,} failed by agent KeyError: 'x'" in text
    assert "math-1/0" in text and "generating" in text and "tool queue" in text
    shown = sum(line.startswith("math-") for line in lines)
    assert (f"{live - shown:,} more live" in text) == (live > shown)
    assert (f"{engines - 5} more" in text) or engines == 2 or height > 24


def test_reward_names_and_runs_are_shown_and_escapes_are_text() -> None:
    history = rollout(8, 2)
    for number, reward in enumerate((1.0, 0.0, 0.5)):
        history.rewards.add(f"g{number // 2}", reward)
    alone = picture(history)
    alone["name"], alone["environment"] = "\x1b[31mred", "math"
    text = "\n".join(drawn(alone, 40, 120))
    assert "\x1b" not in text and r"heddle top · \x1b[31mred (math) ·" in text
    assert "reward 0.500 ± 0.41, solved 33%, 0% of groups without spread" in text
    shares = [
        RunShare("s1", "heddle", 1.0, 3, 0, 0, 10, "1", "train", "math", 8, {"failed": 2}, history.rewards.view()),
        RunShare("s2", "heddle", 2.0, 0, 0, 0, 30, "2", "", "", 0),
    ]
    lines = drawn({**alone, "runs": [asdict(share) for share in shares]}, 40, 120)
    assert "heddle top · 2 runs ·" in lines[0]
    assert lines[1].startswith("run train (math): weight 1, live 3, ended 2 of 8, held 0, 25% of tokens · reward 0.5")
    assert lines[2] == "run s2: weight 2, live 0, ended 0 of 0, held 0, 75% of tokens"
    assert any(line.startswith("train: math-") for line in lines)


def test_steps_that_wait_inside_an_engine_are_no_running_ones() -> None:
    history = rollout(80, 1)
    (engine,) = picture(history)["engines"]
    assert engine["generating"] == 20
    (line,) = [line for line in drawn(picture(history), 24, 80) if "16/16" in line]
    assert line.split()[5:7] == ["4", "0"]


def test_an_idle_engine_beside_a_queue_is_marked() -> None:
    history = rollout(0, 2)
    for number in range(20):
        trajectory = TrajectoryId(f"t{number}")
        history.take(
            ev.TrajectorySubmitted(1, TrajectorySpec(trajectory, GroupId("g"))),
            [cmd.AdmitTrajectory(trajectory)],
        )
        step = StepId(trajectory, 0, 0)
        start = cmd.StartStep(step, EngineId("e0"), NORMAL, number)
        history.take(ev.StepRequested(2, StepRequest(step, 100, 50)), [start])
    shown = picture(history)
    assert [engine["is_idle"] for engine in shown["engines"]] == [False, True]
    (line,) = [line for line in drawn(shown, 24, 80) if " idle " in line]
    assert line.split()[0] == "1"


def test_names_of_users_do_not_steer_the_terminal() -> None:
    evil = "\x1b[2J\x07{}\n[red]" + "x" * 200
    lines = drawn(picture(rollout(10, 2, evil)), 24, 80)
    assert max(map(len, lines)) <= 80 and len(lines) <= 24
    assert not any(not char.isprintable() for line in lines for char in line)
    assert any("[red]" in line or "[2J" in line for line in lines), "no markup is read from it"


def test_bars_show_a_single_trajectory_and_equal_times() -> None:
    assert bars_of([0.0, 10.0], [5, 5], 4) == "████"
    assert bars_of([0.0, 5.0, 10.0], [10_000, 1, 0], 4) == "█▁▁ "
    assert bars_of([], [], 4) == "" and bars_of([1.0], [3], 4) == ""


def test_rates_are_of_the_last_seconds() -> None:
    series = {
        "at_s": [0.0, 50.0, 90.0, 99.0],
        "steps": [0, 100, 100, 200],
        "generated_tokens": [0, 0, 0, 1000],
    }
    assert rates_of({"series": series, "now_s": 100.0, "is_open": True}) == {
        "steps": 10.0,
        "generated_tokens": 100.0,
    }
    assert rates_of({"series": series, "now_s": 100.0, "is_open": False})["steps"] == 0.0
    assert rates_of({"series": series, "now_s": 200.0, "is_open": True})["steps"] == 0.0


def test_the_middle_of_a_long_name_goes() -> None:
    assert shortened("abcdefghij", 5) == "ab…ij" and shortened("abc", 5) == "abc"
