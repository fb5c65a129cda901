"""What an evaluation was asked for: its arms, each with the options of its rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle_dask.cli.engine_option import chosen_model, import_from_here, parsed_vllm_options
from heddle_dask.cli.field_options import Asked
from heddle_dask.core.errors import BadInput
from heddle_dask.environments.agent_tasks import load_agent_tasks
from heddle_dask.evaluation.attempt_plan import ArmIdentity, EvaluationFile

TASKS_OF_AN_ENVIRONMENT = 16


@dataclass(frozen=True, slots=True)
class OrderedArm:
    """An arm, and what its rollout is asked for.

    Attributes
    ----------
    count
        Tasks to draw; None: all that there are.
    """

    identity: ArmIdentity
    asked: Asked
    count: int | None


@dataclass(frozen=True, slots=True)
class ArmsOrder:
    """The arms by model, whose engines they share; how many samples; and what was begun before.

    Attributes
    ----------
    begun
        The file of the evaluation at `out`; None: there is none.
    """

    out: Path
    arms: tuple[OrderedArm, ...]
    samples: int
    seed: int
    passed_from: float
    begun: EvaluationFile | None

    @classmethod
    def of(cls, asked: Asked) -> ArmsOrder:
        """Check and sort what was asked for.

        Raises
        ------
        BadInput
            Options that do not fit together, or that contradict the evaluation that is there.
        """
        out: Path = asked["out"]
        begun = EvaluationFile.read(out)
        if begun is not None and begun.seed != asked["seed"]:
            raise BadInput(f"{out} was begun with --seed {begun.seed}, not {asked['seed']}: its tasks would be others")
        sets, count = _sets_and_count(asked["task_sets"], asked["agents"])
        import_from_here()
        engine = asked["engine"]
        options = parsed_vllm_options(engine, asked.values)
        models = [chosen_model(model, engine, options) for model in asked["models"] or (None,)]
        on = [("", env) for env in asked["envs"]]
        agents = [_absolute(agent) if agent.endswith(".toml") else agent for agent in asked["agents"]]
        on += [(agent, _absolute(tasks)) for agent in agents for tasks in sets]
        identities = [ArmIdentity(tasks, model, agent) for model in models for agent, tasks in on]
        twice = next((each for each in identities if identities.count(each) > 1), None)
        if twice is not None:
            raise BadInput(f"the same arm is asked for twice ({twice.title([])}): give it once")
        arms = tuple(OrderedArm(each, _rollout_of(asked, each, out), count or _count_of(each)) for each in identities)
        return cls(out, arms, asked["samples"], asked["seed"], asked["passed_from"], begun)


def _sets_and_count(given: Sequence[str], agents: Sequence[str]) -> tuple[list[str], int | None]:
    """What ``--tasks`` says: sets of tasks, and at most one number."""
    numbers = [int(text) for text in given if text.isdecimal()]
    sets = [text for text in given if not text.isdecimal()]
    if len(numbers) > 1 or 0 in numbers:
        raise BadInput(f"--tasks {', '.join(map(str, numbers))}: give one number of at least 1")
    if sets and not agents:
        raise BadInput(f"--tasks {sets[0]} is for --agent; with --env it is a number of tasks")
    if agents and not sets:
        raise BadInput("--agent needs --tasks DIR or NAME: the tasks that it is to solve (docs/tasks.md)")
    return sets, numbers[0] if numbers else None


def _absolute(text: str) -> str:
    """A path as it is called from every directory; a name as it is."""
    return str(Path(text).resolve()) if Path(text).exists() else text


def _count_of(identity: ArmIdentity) -> int | None:
    if identity.agent:
        return load_agent_tasks(identity.tasks).size or TASKS_OF_AN_ENVIRONMENT
    return TASKS_OF_AN_ENVIRONMENT


def _rollout_of(asked: Asked, identity: ArmIdentity, out: Path) -> Asked:
    """The options of ``heddle rollout`` for one arm; seed, samples and mode follow from what its store has."""
    values: dict[str, Any] = {
        "env": f"agent:{identity.agent}:{identity.tasks}" if identity.agent else identity.tasks,
        "model": identity.model,
        "out": out / "arms" / f"{identity.slug}.zarr",
        "accept_changes": asked["accept_changes"],
    }
    return asked.but(**values)
