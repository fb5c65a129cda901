"""Several environments mixed: each task is of one of them, drawn by weight.

Names on the command line: ``math:hard=2,code:hard=1``. A part without a weight has weight 1. Paths and addresses may
have ``,`` and ``=`` themselves.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from heddle_dask.core.errors import BadInput, is_finite
from heddle_dask.environments.base import Context, Environment, Reward, Task
from heddle_dask.environments.loading import BUILT_IN, FROM_ELSEWHERE
from heddle_dask.environments.task_sources import EnvironmentSource, SourcedTask, TaskSource


@dataclass(frozen=True, slots=True)
class MixPart:
    """One environment of a mix, by its text, and its weight: any finite number above 0."""

    spec: str
    weight: float = 1.0


def parse_mix(text: str) -> tuple[MixPart, ...]:
    """The parts of ``--env``; a text that names one environment is a mix of one part.

    Raises
    ------
    BadInput
        A weight is no number above 0, a part is empty, or two parts are the same.
    """
    if text.partition(":")[0] in ("replay", "agent"):
        return (MixPart(text),)  # the path of a trace, or of tasks, may have any character
    words: list[str] = []
    for word in text.split(","):
        if words and _is_elsewhere(words[-1]) and not _begins_part(word):
            words[-1] += f",{word}"  # of its path
        else:
            words.append(word.strip())
    if not all(words):
        raise BadInput(f"--env {text!r}: a part is empty; use NAME=WEIGHT,NAME=WEIGHT")
    alone = len(words) == 1 and _is_elsewhere(text)
    parts = [MixPart(text)] if alone else [_part(word) for word in words]
    for spec, count in Counter(part.spec for part in parts).items():
        if count > 1:
            raise BadInput(f"--env {text!r}: {spec!r} is there {count} times: give it one weight")
    return tuple(parts)


def _is_elsewhere(word: str) -> bool:
    return word.partition(":")[0] in FROM_ELSEWHERE


def _begins_part(word: str) -> bool:
    return ":" in word or word.strip().partition("=")[0] in BUILT_IN


def _part(word: str) -> MixPart:
    spec, equals, given = word.rpartition("=")
    try:
        weight = float(given)
    except ValueError:
        weight = float("nan")
    _, query, asked = spec.partition("?")
    is_own = weight != weight or (query and "=" not in asked)  # `?sessions=16` has no weight behind it
    if not equals or (_is_elsewhere(word) and is_own):
        return MixPart(word)
    _check_weight(spec, weight, given)
    return MixPart(spec, weight)


def _check_weight(name: str, weight: object, given: object) -> None:
    if not is_finite(weight) or not weight > 0:
        raise BadInput(f"environment {name!r} has weight {given}: use a finite number above 0")


class Mix:
    """Draws which part comes at which position; a function of the seed."""

    def __init__(self, weights: Mapping[str, float], seed: int) -> None:
        if not weights:
            raise BadInput("a mix without an environment: give at least one")
        for name, weight in weights.items():
            _check_weight(name, weight, weight)
        self._names = tuple(weights)
        self._weights = tuple(weights.values())
        self._seed = seed
        # The draws so far, and how often each name was drawn before each of them.
        self._drawn: list[tuple[str, int]] = []
        self._counts: Counter[str] = Counter()

    def at(self, position: int) -> tuple[str, int]:
        """The name of the part at a position, and how many earlier positions are of that part."""
        while len(self._drawn) <= position:
            draw = random.Random(f"mix {self._seed}/{len(self._drawn)}")
            name = draw.choices(self._names, self._weights)[0]
            self._drawn.append((name, self._counts[name]))
            self._counts[name] += 1
        return self._drawn[position]

    @property
    def shares(self) -> Mapping[str, float]:
        """The share of each part that the weights ask for."""
        total = sum(self._weights)
        return {name: weight / total for name, weight in zip(self._names, self._weights, strict=True)}


class MixedSource:
    """Tasks of several sources, by weight.

    Parameters
    ----------
    parts
        Sources with their weights. The mix ends where the source that is drawn has ended.

    Raises
    ------
    BadInput
        There is none, two have an environment of the same name, or a weight is no finite number above 0.
    """

    def __init__(self, parts: Sequence[tuple[TaskSource, float]], seed: int) -> None:
        self._sources = dict(zip(map(_name_of, parts), (source for source, _ in parts), strict=True))
        _check_unique([e.name for source, _ in parts for e in source.environments])
        self._mix = Mix({_name_of(part): part[1] for part in parts}, seed)
        self._seed = seed

    @property
    def environments(self) -> Sequence[Environment]:
        return [each for source in self._sources.values() for each in source.environments]

    @property
    def description(self) -> str:
        parts = (f"{share:.6g} of {self._sources[name].description}" for name, share in self._mix.shares.items())
        return f"mix of {'; '.join(parts)}; seed {self._seed}"

    def task(self, position: int) -> SourcedTask | None:
        name, index = self._mix.at(position)
        return self._sources[name].task(index)

    @property
    def shares(self) -> Mapping[str, float]:
        """The share of each part that the weights ask for, by the names of its environments."""
        return self._mix.shares


def _name_of(part: tuple[TaskSource, float]) -> str:
    return "+".join(environment.name for environment in part[0].environments)


def _check_unique(names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise BadInput(f"environment {name!r} is {count} times in a mix: give it one weight")


class MixedEnvironment:
    """Several environments as one, for `Rollout` and a number of tasks.

    Its trajectories keep the name of the part that they are of. Task ids begin with it where two parts may have the
    same ones.
    """

    def __init__(self, parts: Sequence[tuple[Environment, float]]) -> None:
        _check_unique([environment.name for environment, _ in parts])
        self._parts = {environment.name: environment for environment, _ in parts}
        self._weights = {environment.name: weight for environment, weight in parts}
        Mix(self._weights, 0)
        self._part_of: dict[str, str] = {}
        self.uses_sandbox = any(getattr(part, "uses_sandbox", False) for part in self._parts.values())

    @property
    def name(self) -> str:
        """Names and weights, as on the command line."""
        return ",".join(f"{name}={weight:g}" for name, weight in self._weights.items())

    @property
    def parts(self) -> Mapping[str, Environment]:
        return dict(self._parts)

    @property
    def weights(self) -> Mapping[str, float]:
        return dict(self._weights)

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        """`count` different tasks in all, in a seeded order."""
        mix = Mix(self._weights, seed)
        order = [mix.at(position) for position in range(count)]
        wanted = Counter(name for name, _ in order)
        drawn = {name: list(self._parts[name].tasks(wanted[name], seed)) for name in wanted}
        tasks = [self._mine(name, drawn[name][index]) for name, index in order if index < len(drawn[name])]
        if len({task.task_id for task in tasks}) < len(tasks):
            raise BadInput(f"environment {self.name!r}: a part gave two tasks with the same id")
        return tasks

    def _mine(self, name: str, task: Task) -> Task:
        known = self._part_of.setdefault(task.task_id, name)
        if known != name:
            task = replace(task, task_id=f"{name}/{task.task_id}")
            self._part_of[task.task_id] = name
        return task

    def part_of(self, task: Task) -> Environment:
        name = self._part_of.get(task.task_id)
        if name is None:
            raise BadInput(f"task {task.task_id!r} is of no part of the mix {self.name}: draw it with tasks()")
        return self._parts[name]

    async def solve(self, task: Task, ctx: Context) -> float | Reward | None:
        return await self.part_of(task).solve(task, ctx)


def mixed_environment(text: str, load: Callable[[str], Environment]) -> Environment:
    """The environment that ``--env`` names: one, or a mix."""
    parts = parse_mix(text)
    if len(parts) == 1:
        return load(parts[0].spec)
    return MixedEnvironment([(load(part.spec), part.weight) for part in parts])


def mixed_source(text: str, load: Callable[[str], Environment], seed: int) -> TaskSource:
    """The endless source of tasks that ``--env`` names."""
    parts = parse_mix(text)
    sources = [(EnvironmentSource(load(part.spec), seed), part.weight) for part in parts]
    return sources[0][0] if len(sources) == 1 else MixedSource(sources, seed)


def part_of(environment: Environment, task: Task) -> Environment:
    """The environment that has the program for a task: the part of a mix, else the environment itself."""
    return environment.part_of(task) if isinstance(environment, MixedEnvironment) else environment


def parts_of(environment: Environment) -> Collection[Environment]:
    """The parts of a mix; of any other environment itself alone."""
    return environment.parts.values() if isinstance(environment, MixedEnvironment) else (environment,)


@dataclass(slots=True)
class MixShare:
    """One part of a mix in a run.

    Attributes
    ----------
    sampled, consumed
        Trajectories that were asked for, and those of them that came to their end (completed or truncated).
    """

    share: float
    sampled: int
    consumed: int = 0


def mix_of(environment: Environment, tasks: Sequence[Task], samples: int) -> dict[str, MixShare]:
    """The parts of a mix by name, with what was sampled of each; empty where the environment is no mix."""
    if not isinstance(environment, MixedEnvironment):
        return {}
    sampled = Counter(environment.part_of(task).name for task in tasks)
    shares = Mix(environment.weights, 0).shares
    return {name: MixShare(share, sampled[name] * samples) for name, share in shares.items()}
