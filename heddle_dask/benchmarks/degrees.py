"""What the search for degrees costs, what it chooses, and whether its quick score can be trusted: a row per profile.

Lengths are those of `benchmarks.placement`, cut at the 40,000 tokens that the paper allows. Slots are 100 for each GPU
of an engine. A degree at which the model does not fit is left out.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf

import numpy as np

from heddle_dask.benchmarks.placement import SLOTS, synthetic_works
from heddle_dask.benchmarks.predictor_scores import ranks
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.strategies.partition.work import Work
from heddle_dask.strategies.partition.work_plan import WorkEngine, plan_by_work
from heddle_dask.strategies.tp_degrees.annealing import sorted_start
from heddle_dask.strategies.tp_degrees.choice import choose_degrees
from heddle_dask.strategies.tp_degrees.degrees import Budget, DegreeChoice, SearchSettings, State
from heddle_dask.strategies.tp_degrees.packing import Packing

DEGREES = (8, 4, 2, 1)
MOST_TOKENS = 40_000.0


@dataclass(frozen=True, slots=True)
class DegreeRow:
    """Seconds of the search are CPU time (one thread), the median and the most of the repeats.

    Attributes
    ----------
    makespan_s
        Of the chosen degrees, by work.
    uniform_s
        The same of each uniform degree; None where some trajectory does not fit.
    gain
        Best uniform over chosen makespan.
    walk_over_best
        Makespan of the annealing alone over that with the exact finish, by the quick score.
    live_gain, rank_correlation, live_regret
        With the live placement (`plan_by_work`): best uniform over chosen makespan; Spearman's correlation of the quick
        score with it over random mixes and the uniform states; chosen makespan over the best among all these. None
        when no state was checked.
    """

    profile: str
    gpus: int
    trajectories: int
    search_s: float
    search_most_s: float
    tried: int
    degrees: dict[int, int]
    makespan_s: float
    uniform_s: dict[int, float | None]
    gain: float
    walk_over_best: float
    live_gain: float | None
    rank_correlation: float | None
    live_regret: float | None


def measure_degrees(
    profiles: Sequence[str], trajectories: int, gpus: int, *, seed: int, repeats: int, checked: int
) -> Iterator[DegreeRow]:
    """Search for each profile.

    Parameters
    ----------
    checked
        Random mixes that are placed by `plan_by_work` as well (most of a second each); 0 leaves the check out.
    """
    works = capped_works(trajectories, seed)
    for profile in profiles:
        engines = engines_of(profile)
        budget = Budget(gpus, degrees=tuple(engines))
        yield _row(profile, works, budget, engines, seed=seed, repeats=repeats, checked=checked)


def capped_works(count: int, seed: int) -> list[Work]:
    """The batch of `heddle bench placement`, no trajectory longer than 40,000 tokens."""
    return [
        replace(work, decode_tokens=min(work.decode_tokens, MOST_TOKENS))
        for work in synthetic_works(count, seed)
    ]


def engines_of(profile: str) -> dict[int, WorkEngine]:
    """Cost and slots at each degree at which the profile's model fits."""
    engines: dict[int, WorkEngine] = {}
    refusal: BadInput | None = None
    for degree in DEGREES:
        try:
            engines[degree] = WorkEngine(load_profile(profile, degree), SLOTS * degree)
        except BadInput as error:
            refusal = error
    if not engines and refusal is not None:
        raise refusal
    return engines


def _row(
    profile: str,
    works: list[Work],
    budget: Budget,
    engines: dict[int, WorkEngine],
    *,
    seed: int,
    repeats: int,
    checked: int,
) -> DegreeRow:
    took_s: list[float] = []
    for _ in range(repeats):
        began_s = time.process_time()
        choice = choose_degrees(works, budget, engines, seed=seed, settings=SearchSettings(mix_gain=0))
        took_s.append(time.process_time() - began_s)
    walked = choose_degrees(
        works, budget, engines, seed=seed, settings=SearchSettings(exact_gpus=0, mix_gain=0)
    )
    packing = Packing(works, budget, engines, SearchSettings().grid)
    chosen, by_walk = (packing.seconds(budget.state_of(found.degrees)) for found in (choice, walked))
    live = _live(packing, works, budget, engines, choice, seed, checked) if checked else (None, None, None)
    return DegreeRow(
        profile=profile,
        gpus=budget.gpus,
        trajectories=len(works),
        search_s=round(statistics.median(took_s), 4),
        search_most_s=round(max(took_s), 4),
        tried=choice.tried,
        degrees={d: choice.degrees.count(d) for d in budget.degrees if d in choice.degrees},
        makespan_s=round(choice.seconds, 3),
        uniform_s={d: round(s, 3) if s < inf else None for d, s in choice.uniform.items()},
        gain=round(min(choice.uniform.values()) / choice.seconds, 4),
        walk_over_best=round(by_walk / chosen, 4),
        live_gain=live[0],
        rank_correlation=live[1],
        live_regret=live[2],
    )


def _live(
    packing: Packing,
    works: list[Work],
    budget: Budget,
    engines: dict[int, WorkEngine],
    choice: DegreeChoice,
    seed: int,
    checked: int,
) -> tuple[float, float, float]:
    """The three comparisons with the live placement."""
    rng = random.Random(seed)
    uniform = [state for _, state in budget.uniform() if packing.seconds(state) < inf]
    chosen = budget.state_of(choice.degrees)
    mixes = [sorted_start(budget, rng) for _ in range(checked)]
    states = [s for s in dict.fromkeys([chosen, *uniform, *mixes]) if packing.seconds(s) < inf]

    def live_s(state: State) -> float:
        return plan_by_work(works, [engines[d] for d in budget.degrees_of(state)]).seconds

    live = {state: live_s(state) for state in states}
    return (
        round(min(live[state] for state in uniform) / live[chosen], 4),
        round(rank_correlation([packing.seconds(s) for s in states], [live[s] for s in states]), 4),
        round(live[chosen] / min(live.values()), 4),
    )


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, ties sharing theirs; 1 where either has one rank only."""
    if len(set(one)) < 2 or len(set(other)) < 2:
        return 1.0
    return statistics.correlation(*(ranks(np.asarray(values)).tolist() for values in (one, other)))


def as_json(rows: Sequence[DegreeRow]) -> dict[str, object]:
    """The JSON object of ``heddle bench degrees``."""
    return {"rows": [asdict(row) for row in rows]}
