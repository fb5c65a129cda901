"""What the search for degrees costs, and what it chooses: a row per profile.

Lengths are log-normal and shared in part by the 16 members of a group, cut at the 40,000 tokens that the paper allows.
Slots are 100 for each GPU of an engine. A degree at which the model does not fit is left out.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.strategies.parallelism.choice import choose_degrees
from heddle_dask.strategies.parallelism.degrees import Budget, SearchSettings
from heddle_dask.strategies.parallelism.packing import Packing
from heddle_dask.strategies.partition.work import Work
from heddle_dask.strategies.partition.work_plan import WorkEngine

DEGREES = (8, 4, 2, 1)
MOST_TOKENS = 40_000.0
SLOTS = 100
GROUP = 16
PROMPT_TOKENS = 600


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


def measure_degrees(
    profiles: Sequence[str], trajectories: int, gpus: int, *, seed: int, repeats: int
) -> Iterator[DegreeRow]:
    """Search for each profile."""
    works = capped_works(trajectories, seed)
    for profile in profiles:
        engines = engines_of(profile)
        budget = Budget(gpus, degrees=tuple(engines))
        yield _row(profile, works, budget, engines, seed=seed, repeats=repeats)


def capped_works(count: int, seed: int) -> list[Work]:
    """`count` trajectories from the longest to the shortest, none longer than 40,000 tokens."""
    rng = random.Random(seed)
    works: list[Work] = []
    for i in range(count):
        if i % GROUP == 0:
            group_tokens = rng.lognormvariate(7.5, 0.8)
        tokens = group_tokens * rng.lognormvariate(0, 0.6)
        works.append(Work(f"g{i // GROUP}", tokens, PROMPT_TOKENS, PROMPT_TOKENS))
    works.sort(key=lambda work: -work.decode_tokens)
    return [replace(work, decode_tokens=min(work.decode_tokens, MOST_TOKENS)) for work in works]


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
    )


def as_json(rows: Sequence[DegreeRow]) -> dict[str, object]:
    """The JSON object of ``heddle bench degrees``."""
    return {"rows": [asdict(row) for row in rows]}
