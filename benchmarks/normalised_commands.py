"""Commands as plain lines that do not depend on the classes of commands.

A line has the type's name and its leaves by fixed keys. The lines of two versions are comparable as long as the keys
keep their meaning: a version that nests or renames fields changes only the functions below.

The keys: `step` is trajectory, step index and attempt, joined by slashes; `priority` is one float (larger runs first);
engines, hosts and actions are identifiers. Human-readable texts (`reason`, `cause`) are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from heddle_dask.core import commands as cmd
from heddle_dask.core.ids import StepId
from heddle_dask.core.nouns import Priority

Leaves = dict[str, str | int | float | bool | None]


def command_row(command: cmd.Command) -> tuple[str, Leaves] | None:
    """Type name and leaves of a command; None for commands without a line.

    Raises
    ------
    TypeError
        There is no function for this type of command.
    """
    match command:
        case cmd.AdmitTrajectory():
            return "AdmitTrajectory", _admit(command)
        case cmd.StartStep():
            return "StartStep", _start_step(command)
        case cmd.AbortStep():
            return "AbortStep", _abort_step(command)
        case cmd.GiveUpStep():
            return "GiveUpStep", _give_up_step(command)
        case cmd.PredictRemaining():
            return "PredictRemaining", _predict(command)
        case cmd.MoveContext():
            return "MoveContext", _move(command)
        case cmd.RunAction():
            return "RunAction", _run_action(command)
        case cmd.AbortAction():
            return "AbortAction", _abort_action(command)
        case cmd.GiveUpAction():
            return "GiveUpAction", _give_up_action(command)
        case cmd.ReleaseEngine() | cmd.ReleaseHost():
            return None  # bodies differ in what they make of it
        case cmd.DropContext() | cmd.PlanDegrees() | cmd.DeployEngines():
            return None  # commands that older versions did not have: the body decided
        case _:
            raise TypeError(f"{type(command).__name__}: say in {__name__} which leaves its line has")


def command_rows(commands: Sequence[cmd.Command]) -> list[tuple[str, Leaves]]:
    """The rows of several commands, in their order."""
    return [row for row in map(command_row, commands) if row is not None]


def canonical(value: object) -> str:
    """JSON without spaces, sorted keys, floats with all digits: equal values give equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _step(step_id: StepId) -> str:
    return "/".join(map(str, step_id))


def _priority(priority: Priority) -> float:
    """One float: the tokens without a level, else the level plus a fraction that grows with the tokens."""
    level, tokens = priority
    return float(level) + tokens / (1.0 + tokens) if level else float(tokens)


def _admit(command: cmd.AdmitTrajectory) -> Leaves:
    # Only the trajectory: the engine is visible in the step's placement.
    return {"trajectory": command.trajectory_id}


def _start_step(command: cmd.StartStep) -> Leaves:
    return {
        "step": _step(command.step_id),
        "engine": command.engine_id,
        "priority": _priority(command.priority),
        "order": command.order,
        "source": command.source_engine_id,
        "bypass_queue": command.bypass_queue,
    }


def _abort_step(command: cmd.AbortStep) -> Leaves:
    return {
        "step": _step(command.step_id),
        "engine": command.engine_id,
    }


def _give_up_step(command: cmd.GiveUpStep) -> Leaves:
    return {"step": _step(command.step_id)}


def _predict(command: cmd.PredictRemaining) -> Leaves:
    return {"trajectory": command.trajectory_id}


def _move(command: cmd.MoveContext) -> Leaves:
    return {
        "trajectory": command.trajectory_id,
        "source": command.source_engine_id,
        "target": command.target_engine_id,
        "kind": command.kind,
    }


def _run_action(command: cmd.RunAction) -> Leaves:
    return {"action": command.action_id, "host": command.host_id, "cpus": command.cpus}


def _abort_action(command: cmd.AbortAction) -> Leaves:
    return {"action": command.action_id, "host": command.host_id}


def _give_up_action(command: cmd.GiveUpAction) -> Leaves:
    return {"action": command.action_id}
