"""The split of GPUs between trainer and rollout in ``heddle plan``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.gpu_split import (
    NODES_APART,
    GpuSplit,
    Overlap,
    SecondsOf,
    best_split,
    scaling_law,
    seconds_between,
)

if TYPE_CHECKING:
    from heddle_dask.sim.plan import PlayedCandidate


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """What the user says of the training.

    Attributes
    ----------
    trainer, told
        Seconds of a trainer step by GPUs, and where they come from.
    batch
        Trajectories of a training batch; 0: as many as are simulated.
    choices
        Numbers of GPUs for the trainer; empty: whole nodes, of fewer than four any number.
    """

    trainer: SecondsOf
    told: str
    total_gpus: int
    overlap: Overlap
    batch: int = 0
    update_s: float = 0.0
    choices: Sequence[int] = ()

    @classmethod
    def of(
        cls, trainer: str | None, total_gpus: int | None, overlap: Overlap, batch: int | None, update_s: float
    ) -> SplitRequest | None:
        """From the options; None if no split is asked for."""
        if trainer is None and total_gpus is None:
            return None
        if trainer is None or total_gpus is None:
            lacking = "--trainer-s" if trainer is None else "--total-gpus"
            raise BadInput(f"{lacking} is missing: a split needs --trainer-s 5+960/gpus and --total-gpus 72")
        return cls(scaling_law(trainer), trainer, total_gpus, overlap, batch or 0, update_s)


@dataclass(frozen=True, slots=True)
class SplitAnswer:
    """The best split, all that were tried, and the rollout's seconds on which they rest."""

    request: SplitRequest
    best: GpuSplit
    tried: tuple[GpuSplit, ...]
    rollout_s: Mapping[int, float]


def split_answer(
    request: SplitRequest, best: Sequence[PlayedCandidate], trajectories: int, gpus_per_node: int
) -> SplitAnswer:
    """Try every split: the trainer on each of its choices, the rollout on the rest.

    Parameters
    ----------
    best
        The best fleet of each simulated number of rollout GPUs.
    """
    batch = request.batch or trajectories
    rollout_s = {one.gpus: one.makespan_s * batch / trajectories for one in best}
    total = request.total_gpus
    step = gpus_per_node if total >= NODES_APART * gpus_per_node else 1
    found, tried = best_split(
        total,
        request.trainer,
        seconds_between(rollout_s),
        trainer_choices=request.choices or range(step, total, step),
        rollout_unit=min(max(one.candidate.tp_degrees) for one in best),
        overlap=request.overlap,
        update_s=request.update_s,
    )
    return SplitAnswer(request, found, tried, rollout_s)


def split_lines(answer: SplitAnswer) -> list[str]:
    """A table of the splits, and the best in words."""
    request, best = answer.request, answer.best
    points = ", ".join(f"{gpus} GPUs {seconds:,.1f} s" for gpus, seconds in sorted(answer.rollout_s.items()))
    lines = [
        "",
        f"split of {request.total_gpus} GPUs, {request.overlap}; rollout simulated at {points}",
        "  trainer  rollout  trainer s  rollout s  step s  trainer waits  rollout waits",
    ]
    for one in answer.tried:
        lines.append(
            f"{'*' if one is best else ' '} {one.trainer_gpus:>7}  {one.rollout_gpus:>7}  {one.trainer_s:9,.1f}  "
            f"{one.rollout_s:9,.1f}  {one.step_s:6,.1f}  {one.trainer_wait_share:13.0%}  "
            f"{one.rollout_wait_s / one.step_s:13.0%}"
        )
    beyond = best.rollout_gpus > max(answer.rollout_s) or best.rollout_gpus < min(answer.rollout_s)
    told = "; outside the simulated numbers: give them to --gpus" if beyond else ""
    lines.append(
        f"{best.trainer_gpus} GPUs train and {best.rollout_gpus} roll out "
        f"(1:{best.rollout_gpus / best.trainer_gpus:.2g}): a step takes {best.step_s:,.1f} s, the trainer waits "
        f"{best.trainer_wait_s:,.1f} s of it ({best.trainer_wait_share:.0%}){told}"
    )
    return lines


def split_json(answer: SplitAnswer) -> dict[str, Any]:
    request = answer.request
    return {
        "total_gpus": request.total_gpus,
        "overlap": request.overlap,
        "trainer_s": request.told,
        "update_s": request.update_s,
        "rollout_s": {str(gpus): round(seconds, 3) for gpus, seconds in answer.rollout_s.items()},
        "chosen": answer.best.figures(),
        "tried": [one.figures() for one in answer.tried],
    }
