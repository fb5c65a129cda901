"""Strategies by seeds: which trajectories each seed draws, and what a warm predictor has seen before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from heddle_dask.core.errors import BadInput
from heddle_dask.sim.bound import makespan_bound
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.sim.rollout import Arm, SimulatedRollout, check_fit, simulate
from heddle_dask.strategies.presets import build_strategies
from heddle_dask.workloads.choice import load_workload
from heddle_dask.workloads.planned import PlannedTrajectory
from heddle_dask.workloads.synthetic import WORKLOADS

WARM_TRAJECTORIES = 1600
_OTHER_SEED = 1_000_003


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """What is drawn for each seed; the fields are those of `workloads.choice.load_workload`."""

    name: str
    trajectories: int
    samples: int
    max_context_tokens: int
    token_scale: float = 1.0
    tool_scale: float = 1.0

    def drawn(self, seed: int) -> list[PlannedTrajectory]:
        """The trajectories of a seed.

        Raises
        ------
        BadInput
            As `load_workload`.
        """
        return self._load(self.trajectories, seed)

    def others(self, seed: int) -> list[PlannedTrajectory]:
        """About `WARM_TRAJECTORIES` of groups that `drawn` of this seed does not have; under names of their own.

        Of a trace file each group comes once; none may be left.
        """
        if self.name in WORKLOADS:
            count = -(-WARM_TRAJECTORIES // self.samples) * self.samples
            found = self._load(count, seed + _OTHER_SEED)
        else:
            seen = {_recorded(plan.group_id) for plan in self.drawn(seed)}
            numbers: dict[str, str] = {}
            found = []
            for plan in self._load(4 * WARM_TRAJECTORIES, seed + _OTHER_SEED):
                group = _recorded(plan.group_id)
                # A group that is drawn again comes under another number.
                if group not in seen and numbers.setdefault(group, plan.group_id) == plan.group_id:
                    found.append(plan)
            found = found[:WARM_TRAJECTORIES]
        return [
            replace(plan, trajectory_id=f"earlier {plan.trajectory_id}", group_id=f"earlier {plan.group_id}")
            for plan in found
        ]

    def _load(self, trajectories: int, seed: int) -> list[PlannedTrajectory]:
        return load_workload(
            self.name,
            trajectories=trajectories,
            samples=self.samples,
            seed=seed,
            token_scale=self.token_scale,
            tool_scale=self.tool_scale,
            max_context_tokens=self.max_context_tokens,
        )


def parse_arms(text: str, overrides: Sequence[str] = ()) -> list[Arm]:
    """Strategies separated by commas, each ``preset:part=name,option=value:…``; `overrides` go to all of them.

    Raises
    ------
    BadInput
        None is named, one comes twice, or one is not understood.
    """
    written: list[str] = []
    for piece in text.split(","):
        # The commas inside of a part stand before option=value, those between strategies before a preset.
        if written and "=" in piece.partition(":")[0]:
            written[-1] += f",{piece}"
        else:
            written.append(piece.strip())
    arms = [Arm.parse(one) for one in written if one]
    if not arms:
        raise BadInput("no strategy is named: give presets, separated by commas")
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInput(f"strategy '{twice}' comes twice: name it once")
    arms = [Arm(arm.name, arm.preset, (*arm.overrides, *overrides)) for arm in arms]
    for arm in arms:
        build_strategies(arm.preset, overrides=arm.overrides)
    return arms


def sweep(
    workload: SimulatedWorkload,
    fleet: SimulatedFleet,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    *,
    warm: bool,
    watched_seed: int | None = None,
) -> Iterator[SimulatedRollout]:
    """One rollout after the other, all arms of a seed over the same trajectories.

    Parameters
    ----------
    warm
        Whether learning predictors learn first, from `SimulatedWorkload.others`.
    watched_seed
        The seed of which the rollouts keep their timelines.

    Raises
    ------
    BadInput
        As `SimulatedWorkload.drawn` and `rollout.simulate`.
    """
    for seed in seeds:
        plans = workload.drawn(seed)
        check_fit(plans, fleet)
        others = workload.others(seed) if warm else None
        bound = makespan_bound(plans, fleet)
        for arm in arms:
            yield simulate(
                arm.preset,
                arm.overrides,
                fleet,
                plans,
                seed=seed,
                warm=others,
                name=arm.name,
                bound=bound,
                watched=seed == watched_seed,
            )


def _recorded(group_id: str) -> str:
    """The name of a drawn group in its file."""
    return group_id.rpartition("~")[0]
