"""How many of a number of GPUs train and how many roll out, so that a training step is shortest.

RollArt's production run split them 1:5 by hand; its trainer waited up to 62 % of a step for samples (OSDI'26, section
6.5). Both seconds are functions of their GPUs here, and every split is tried.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from heddle_dask.core.errors import BadInput, is_finite

Overlap = Literal["sync", "async"]
SecondsOf = Callable[[int], float]

NODES_APART = 4
"""From so many nodes on, the trainer has whole ones."""


@dataclass(frozen=True, slots=True)
class GpuSplit:
    """One split of the GPUs, and the step that it leads to.

    Attributes
    ----------
    trainer_s, rollout_s
        Seconds of an optimiser step with its batch, and of the rollout of a batch.
    step_s
        ``sync``: one after the other, and the update of the weights. ``async``: the longer of them, and the update.
    trainer_wait_s, rollout_wait_s
        Seconds of a step in which the trainer waits for samples, and in which the rollout waits for the trainer (or,
        with ``async``, for credit).
    """

    trainer_gpus: int
    rollout_gpus: int
    trainer_s: float
    rollout_s: float
    step_s: float
    trainer_wait_s: float
    rollout_wait_s: float

    @property
    def trainer_wait_share(self) -> float:
        return self.trainer_wait_s / self.step_s if self.step_s else 0.0

    def figures(self) -> dict[str, float]:
        return {
            "trainer_gpus": self.trainer_gpus,
            "rollout_gpus": self.rollout_gpus,
            "ratio": round(self.rollout_gpus / self.trainer_gpus, 3),
            "trainer_s": round(self.trainer_s, 3),
            "rollout_s": round(self.rollout_s, 3),
            "step_s": round(self.step_s, 3),
            "trainer_wait_s": round(self.trainer_wait_s, 3),
            "trainer_wait_share": round(self.trainer_wait_share, 4),
            "rollout_wait_s": round(self.rollout_wait_s, 3),
        }


def split_of(
    trainer_gpus: int,
    rollout_gpus: int,
    trainer: SecondsOf,
    rollout: SecondsOf,
    overlap: Overlap,
    update_s: float,
) -> GpuSplit:
    """The step of one split. `update_s`: exposed seconds of a weight update, in which both wait."""
    trainer_s, rollout_s = trainer(trainer_gpus), rollout(rollout_gpus)
    busy_s = trainer_s + rollout_s if overlap == "sync" else max(trainer_s, rollout_s)
    step_s = busy_s + update_s
    return GpuSplit(trainer_gpus, rollout_gpus, trainer_s, rollout_s, step_s, step_s - trainer_s, step_s - rollout_s)


def best_split(
    gpus: int,
    trainer: SecondsOf,
    rollout: SecondsOf,
    *,
    trainer_choices: Iterable[int],
    rollout_unit: int = 1,
    overlap: Overlap = "async",
    update_s: float = 0.0,
) -> tuple[GpuSplit, tuple[GpuSplit, ...]]:
    """The split with the shortest step, and all that were tried; of equal ones that with fewer trainer GPUs.

    Parameters
    ----------
    trainer_choices
        Numbers of GPUs on which the trainer can run.
    rollout_unit
        GPUs of an engine: the rollout gets a multiple of it, and the rest is idle.
    """
    tried = []
    for trainer_gpus in sorted(set(trainer_choices)):
        rollout_gpus = (gpus - trainer_gpus) // rollout_unit * rollout_unit
        if trainer_gpus >= 1 and rollout_gpus >= rollout_unit:
            tried.append(split_of(trainer_gpus, rollout_gpus, trainer, rollout, overlap, update_s))
    if not tried:
        raise BadInput(f"{gpus} GPUs leave none for the rollout beside the trainer: use more GPUs or fewer for it")
    return min(tried, key=lambda split: (split.step_s, split.trainer_gpus)), tuple(tried)


def seconds_between(known: Mapping[int, float]) -> SecondsOf:
    """Seconds as a function of GPUs from some measured or simulated points.

    Between two points a power of the number of GPUs; outside, that of the two nearest points, but never faster than
    proportional, nor slower with more GPUs. One point alone is taken to scale proportionally.
    """
    if not known or not all(count >= 1 and is_finite(s) and s > 0 for count, s in known.items()):
        raise BadInput(f"seconds by GPUs are {dict(known)!r}: give at least one number above 0, such as 8=120")
    points = sorted(known.items())
    counts = [count for count, _ in points]

    def seconds(gpus: int) -> float:
        if len(points) == 1:
            return points[0][1] * points[0][0] / gpus
        at = min(max(1, bisect_left(counts, gpus)), len(points) - 1)
        (low, low_s), (high, high_s) = points[at - 1], points[at]
        power = math.log(high_s / low_s) / math.log(high / low)
        if not low <= gpus <= high:
            power = min(0.0, max(-1.0, power))
        near, near_s = (low, low_s) if gpus < high else (high, high_s)
        return float(near_s * (gpus / near) ** power)

    return seconds


def scaling_law(text: str) -> SecondsOf:
    """Seconds of a trainer step by GPUs: a table ``8=120,16=64``, or a law ``serial+parallel/gpus`` in seconds.

    ``5+960/gpus`` is Amdahl's law with 5 s that do not scale.
    """
    if "=" in text:
        pairs = [part.partition("=") for part in text.split(",")]
        try:
            return seconds_between({int(count): float(seconds) for count, _, seconds in pairs})
        except BadInput:
            raise
        except ValueError:
            raise BadInput(f"--trainer-s {text}: use GPUs=SECONDS, such as 8=120,16=64") from None
    head, slash, tail = text.partition("/")
    serial, plus, parallel = head.rpartition("+")
    try:
        if slash != "/" or tail.strip() != "gpus":
            raise ValueError
        serial_s, parallel_s = float(serial) if plus else 0.0, float(parallel)
        if not (is_finite(serial_s) and is_finite(parallel_s) and serial_s >= 0 and parallel_s > 0):
            raise ValueError
    except ValueError:
        raise BadInput(f"--trainer-s {text}: use 8=120,16=64 or 5+960/gpus, in seconds") from None
    return lambda gpus: serial_s + parallel_s / gpus
