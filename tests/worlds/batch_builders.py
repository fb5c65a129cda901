"""Batches of synthetic trajectories, and engines by degree, for the tests of placement and of degrees."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.predictor_scores import ranks
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.strategies.partition.work import Work, WorkEngine

DEGREES = (8, 4, 2, 1)
SLOTS_PER_GPU = 100
GROUP = 16
PROMPT_TOKENS = 600
MOST_TOKENS = 40_000.0


def synthetic_works(count: int, seed: int) -> list[Work]:
    """`count` trajectories from the longest to the shortest."""
    rng = random.Random(seed)
    works: list[Work] = []
    for i in range(count):
        if i % GROUP == 0:
            group_tokens = rng.lognormvariate(7.5, 0.8)
        tokens = group_tokens * rng.lognormvariate(0, 0.6)
        works.append(Work(f"g{i // GROUP}", tokens, PROMPT_TOKENS, PROMPT_TOKENS))
    return sorted(works, key=lambda work: -work.decode_tokens)


def capped_works(count: int, seed: int) -> list[Work]:
    """As `synthetic_works`, no trajectory longer than 40,000 tokens."""
    return [replace(work, decode_tokens=min(work.decode_tokens, MOST_TOKENS)) for work in synthetic_works(count, seed)]


def engines_of(profile: str) -> dict[int, WorkEngine]:
    """Cost and slots at each degree of a profile that fits all of `DEGREES`."""
    return {degree: WorkEngine(load_profile(profile, degree), SLOTS_PER_GPU * degree) for degree in DEGREES}


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, ties sharing theirs; 1 where either has one rank only."""
    if len(set(one)) < 2 or len(set(other)) < 2:
        return 1.0
    return statistics.correlation(*(ranks(np.asarray(values)).tolist() for values in (one, other)))
