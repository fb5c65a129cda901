"""``python -m benchmarks passes``: what the history of prompts is worth on a later pass over them.

The attempts at each prompt of a trace are dealt into an earlier and a later pass. A predictor learns from the earlier
one and predicts the later one, attempt by attempt, and sees nothing of its other attempts. *none* has learnt from the
earlier pass, but recognises no prompt. The other arms do: with the earlier pass as it was, or with its lengths times a
factor that is drawn for each prompt, as if the policy had moved on since.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from benchmarks.predictor_scores import rounded_row, score
from benchmarks.row_file import Row
from heddle_dask.core.nouns import Prediction
from heddle_dask.predictors.features import Finished, Floats, Progress
from heddle_dask.predictors.from_steps import PastTrajectory, finished_from_steps
from heddle_dask.predictors.learned import LearnedPredictor
from heddle_dask.predictors.trees import TreeSettings

STEPS = (0, 1, 2, 5)
# Typical factors between the lengths of an earlier and the present policy, drawn for each prompt.
DRIFTS = (1.3, 1.6)


class OfPrompt(Protocol):
    """An attempt at a prompt."""

    @property
    def prompt_key(self) -> str:
        """Identity of the prompt."""


A = TypeVar("A", bound=OfPrompt)


@dataclass(frozen=True, slots=True)
class PassReport:
    """All arms on one trace.

    Attributes
    ----------
    rows
        One arm at one decision point, over the trajectories of the later pass that reached it. `within`: correlation of
        log lengths less their means in each domain. A domain includes model and agent where a trace names them;
        lengths differ between these, which is known without a history. `context`: mean error of the log of the final
        context, and `context_by_all` with the ratio of observation tokens of all trajectories in place of the prompt's.
    """

    trace: str
    prompts: int
    earlier: int
    later: int
    rows: Sequence[Row]


def measure_passes(
    path: Path,
    *,
    seed: int = 0,
    settings: TreeSettings | None = None,
    on_progress: Callable[[str], None] = lambda message: None,
) -> PassReport:
    """Measure one trace, by name or file, with what a session knows when it asks.

    Raises
    ------
    BadInput
        The file is no trace.
    """
    from heddle_dask.live.scheduler.warm_start import past_of_trace

    settings = replace(settings or TreeSettings(), seed=seed)
    earlier, later = deal_passes(past_of_trace(path, 1.0, 1.0), seed)
    tested = [finished_from_steps(one) for one in later if not one.censored]
    arms: dict[str, tuple[Sequence[PastTrajectory], bool]] = {
        "none": (earlier, False),
        "same policy": (earlier, True),
        **{f"moved on by {factor:g}": (drifted(earlier, factor, seed), True) for factor in DRIFTS},
    }
    rows: list[Row] = []
    for name, (known, recognises) in arms.items():
        on_progress(f"{path.name}: history {name}")
        predictor = LearnedPredictor(settings)
        predictor.warm_start(finished_from_steps(one) for one in known)
        rows += _score_rows(name, predictor, tested, recognises)
    prompts = len({one.prompt_key for one in later})
    return PassReport(path.name, prompts, len(earlier), len(later), rows)


def deal_passes(attempts: Iterable[A], seed: int) -> tuple[list[A], list[A]]:
    """An earlier and a later pass: half of the attempts at each prompt each; prompts with one attempt are earlier."""
    prompts: dict[str, list[A]] = {}
    for one in attempts:
        prompts.setdefault(one.prompt_key, []).append(one)
    draws = random.Random(f"passes {seed}")
    earlier: list[A] = []
    later: list[A] = []
    for members in prompts.values():
        draws.shuffle(members)
        half = (len(members) + 1) // 2
        earlier += members[:half]
        later += members[half:]
    # In the order of the trace, prompts would follow one another.
    draws.shuffle(earlier)
    return earlier, later


def drifted(earlier: Sequence[PastTrajectory], factor: float, seed: int) -> list[PastTrajectory]:
    """The attempts of a policy that was, for each prompt, longer or shorter by a typical factor of `factor`."""
    made = []
    for one in earlier:
        scale = drift_of(one.prompt_key, factor, seed)
        steps = [replace(step, generated_tokens=max(1, round(step.generated_tokens * scale))) for step in one.steps]
        made.append(replace(one, steps=steps))
    return made


def drift_of(prompt_key: str, factor: float, seed: int) -> float:
    """The factor of one prompt, log-normal around 1."""
    # A string seeds `Random` by its bytes, which is the same in every process.
    draw = random.Random(f"drift {seed} {prompt_key}").gauss(0.0, 1.0)
    return math.exp(math.log(factor) * draw)


def _score_rows(name: str, predictor: LearnedPredictor, tested: Sequence[Finished], recognises: bool) -> list[Row]:
    rows = []
    for steps in STEPS:
        told = [one for one in tested if len(one.points) > steps]
        if len(told) < 5:
            continue
        points = [one.points[steps] for one in told]
        made = predictor.predict(points if recognises else [_stranger(point) for point in points])
        done = np.array([point.generated_tokens for point in points], dtype=np.float64)
        total = np.array([one.generated_tokens for one in told], dtype=np.float64)
        tokens = np.array([one.tokens for one in made])
        scored = score(done, total, np.log1p(tokens), np.log1p([one.tokens_q90 for one in made]))
        within = _within_domains([one.domain for one in told], np.log1p(done + tokens), np.log1p(total))
        context, by_all = _context_errors(told, points, made)
        reached: dict[str, float | str] = {
            "steps_finished": steps,
            "history": name,
            "trajectories": len(told),
        }
        rest = {"within": within, "context": context, "context_by_all": by_all}
        rows.append(rounded_row({**reached, **scored, **rest}))
    return rows


def _context_errors(
    told: Sequence[Finished], points: Sequence[Progress], made: Sequence[Prediction]
) -> tuple[float, float]:
    """Mean error of the log of the final context: as predicted, and by the ratio of all trajectories."""
    own, by_all = [], []
    for one, point, said in zip(told, points, made, strict=True):
        of_all = (said.observation_per_token or 0.0) * said.tokens
        observed = of_all if said.observation_tokens is None else said.observation_tokens
        final = one.prompt_tokens + one.generated_tokens + one.observed_tokens
        begun = point.context_tokens + said.tokens
        own.append(abs(math.log((begun + observed) / final)))
        by_all.append(abs(math.log((begun + of_all) / final)))
    return sum(own) / len(own), sum(by_all) / len(by_all)


def _within_domains(domains: Sequence[str], predicted: Floats, truth: Floats) -> float:
    names, index = np.unique(np.array(domains), return_inverse=True)
    counts = np.bincount(index, minlength=len(names))
    several = counts[index] > 1
    left = [(values - (np.bincount(index, weights=values) / counts)[index])[several] for values in (predicted, truth)]
    spread = float(left[0].std() * left[1].std())
    return float((left[0] * left[1]).mean()) / spread if spread > 0 else math.nan


def _stranger(point: Progress) -> Progress:
    return replace(point, prompt_key=f"unknown {point.trajectory_id}")
