"""Which attempts an evaluation still has to make, and its file ``evaluation.json``.

An arm is one store. Its attempts are made in batches, each of some tasks with the same number of attempts; what a batch
consists of is written down before it begins, so that the same command goes on with it. More samples, other tasks, and
attempts that the infrastructure has ended come in further batches, so that nothing that was made is lost.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput, one_line_of
from heddle_dask.core.plain_files import read_plain
from heddle_dask.core.value_types import FAULTS
from heddle_dask.evaluation.attempt_outcomes import AttemptOutcome

FILE = "evaluation.json"
_FORMAT, _VERSION = "heddle-evaluation", 1
_SEEDS_APART = 1_000_003
"""Between the seeds of two batches: an attempt that is made again samples anew."""


@dataclass(frozen=True, slots=True)
class AttemptBatch:
    """So many attempts at each of some tasks."""

    task_ids: tuple[str, ...]
    samples: int
    seed: int

    def __len__(self) -> int:
        return len(self.task_ids) * self.samples


@dataclass(frozen=True, slots=True)
class ArmIdentity:
    """What is evaluated on what.

    Attributes
    ----------
    tasks
        The environment, or the task set of an agent.
    agent
        Empty where the environment has its own.
    """

    tasks: str
    model: str
    agent: str = ""

    @property
    def slug(self) -> str:
        """Name of its store: readable, and its own."""
        digest = blake2b(json.dumps(asdict(self)).encode(), digest_size=3).hexdigest()
        words = [_last(part) for part in (self.agent, self.tasks, self.model) if part]
        return "-".join([*words, digest])

    def title(self, others: Iterable[ArmIdentity]) -> str:
        """What tells it from the others, in words; all of it where it is alone."""
        arms = [self, *others]
        parts = {
            name: getattr(self, name)
            for name in ("agent", "tasks", "model")
            if getattr(self, name) and (len(arms) == 1 or any(getattr(o, name) != getattr(self, name) for o in arms))
        }
        return " · ".join(_short(text, {getattr(o, name) for o in arms}) for name, text in parts.items())


@dataclass(frozen=True, slots=True)
class PlannedArm:
    identity: ArmIdentity
    batches: tuple[AttemptBatch, ...] = ()


@dataclass(frozen=True, slots=True)
class EvaluationFile:
    """What an evaluation has begun: its seed, and the batches of each arm by its slug."""

    seed: int
    arms: Mapping[str, PlannedArm] = field(default_factory=dict)

    def with_batches(self, identity: ArmIdentity, batches: Sequence[AttemptBatch]) -> EvaluationFile:
        return EvaluationFile(self.seed, {**self.arms, identity.slug: PlannedArm(identity, tuple(batches))})

    def batches_of(self, identity: ArmIdentity) -> tuple[AttemptBatch, ...]:
        """Those that were written down for an arm."""
        known = self.arms.get(identity.slug)
        return () if known is None else known.batches

    def write(self, directory: Path) -> None:
        """Write it beside its place and rename it: a reader never sees half of it."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "seed": self.seed,
            "arms": {
                slug: {**asdict(arm.identity), "batches": [asdict(batch) for batch in arm.batches]}
                for slug, arm in self.arms.items()
            },
        }
        aside = directory / f".{FILE}.{os.getpid()}.partial"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(content, indent=1), encoding="utf-8")
            os.replace(aside, directory / FILE)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise BadInput(f"--out {directory}: {error.strerror}; give a directory that can be written") from None

    @classmethod
    def read(cls, directory: Path) -> EvaluationFile | None:
        """The file of a directory; None where there is none.

        Raises
        ------
        BadInput
            The directory holds something else, or the file is damaged.
        """
        path = directory / FILE
        if not path.exists():
            if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
                raise BadInput(f"--out {directory} exists and is no evaluation: give another directory")
            return None
        try:
            content: Any = json.loads(read_plain(path))
            if content["format"] != _FORMAT or content["version"] != _VERSION:
                raise ValueError(f"format {content['format']!r}, version {content['version']!r}")
            arms = {str(slug): _arm(body) for slug, body in content["arms"].items()}
            return cls(int(content["seed"]), arms)
        except (*FAULTS, OSError) as error:
            raise BadInput(f"{path} is no file of heddle eval ({one_line_of(error)}): give another --out") from None


def samples_by_task(outcomes: Iterable[AttemptOutcome]) -> Counter[str]:
    """How many attempts count as samples; those that the infrastructure has ended do not."""
    return Counter(each.task_id for each in outcomes if each.is_sample)


def missing_batches(
    task_ids: Sequence[str], has: Mapping[str, int], samples: int, seed: int, made: int
) -> list[AttemptBatch]:
    """The batches that bring every task to so many samples.

    Parameters
    ----------
    has
        Samples by task, with those that a batch which has begun will still make.
    seed, made
        Of the evaluation, and how many batches of the arm there are.
    """
    has = Counter(has)
    lacks = {task: samples - has[task] for task in task_ids if has[task] < samples}
    batches: list[AttemptBatch] = []
    while lacks:
        # Those that lack least decide: all get as many in one batch, whose attempts the predictor sees as groups.
        least = min(lacks.values())
        number = made + len(batches)
        batches.append(AttemptBatch(tuple(lacks), least, (seed + _SEEDS_APART * number) % 2**63))
        lacks = {task: lack - least for task, lack in lacks.items() if lack > least}
    return batches


def _arm(body: Mapping[str, Any]) -> PlannedArm:
    batches = tuple(
        AttemptBatch(tuple(map(str, each["task_ids"])), int(each["samples"]), int(each["seed"]))
        for each in body["batches"]
    )
    return PlannedArm(ArmIdentity(str(body["tasks"]), str(body["model"]), str(body["agent"])), batches)


def _last(text: str) -> str:
    """The last part of a path or name, for a file's name."""
    part = Path(text.rstrip("/")).name or text
    return re.sub(r"[^A-Za-z0-9]+", "-", part.removesuffix(".toml")).strip("-")[:40] or "arm"


def _short(text: str, among: set[str]) -> str:
    """The shortest end of a path that tells it from the others."""
    parts = text.rstrip("/").split("/")
    for count in range(1, len(parts)):
        end = "/".join(parts[-count:])
        if sum(other.rstrip("/").endswith(f"/{end}") or other == end for other in among) <= 1:
            return end
    return text
