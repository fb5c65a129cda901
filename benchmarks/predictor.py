"""``python -m benchmarks predictor``: accuracy of predicted remaining work, its effect on the makespan, and latency.

Folds are by group: a trajectory is predicted by a model that was fitted without its group. *Cold* predictions use no
siblings; *warm* ones use those that had ended by the time of the prediction (for a trace without a clock: all other
members, as earlier runs of the prompt). Scores are over complete trajectories; censored ones are used for fitting
only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import click
import numpy as np

from benchmarks.predictor_scores import makespan, rounded_row, score
from benchmarks.predictor_trace import by_group, read_finished
from benchmarks.row_file import Row
from heddle_dask.core.errors import BadInput
from heddle_dask.predictors.features import NAN, NO_SIBLINGS, Finished, Floats, GroupFacts, Progress
from heddle_dask.predictors.from_steps import finished_from_steps
from heddle_dask.predictors.length_distributions import ResidualDistribution
from heddle_dask.predictors.model import Model, fit_model
from heddle_dask.predictors.samples import facts_then, fold_numbers
from heddle_dask.predictors.trees import TreeSettings
from heddle_dask.workloads.recorded import trace_file

STEPS = (0, 1, 2, 5, 10)
METHODS = ("xgboost cold", "xgboost warm", "group history", "prompt only", "survival mean")
ORDERS = ("q90", "median", "mean")
BATCH_ROWS = (1, 16, 64, 256)
SLOTS = 8
JOBS_PER_SLOT = 16
BATCHES = 20
RANDOM_ORDERS = 20
# 0.9 quantile of the standard normal, to compute the mean of a log-normal from two quantiles.
Z90 = 1.2816


@dataclass(frozen=True, slots=True)
class PredictorJob:
    """A measurement of one trace, by name or file.

    Attributes
    ----------
    points
        ``"asked"``: with the facts of a live session at its request, which is made during a step's tool call: the
        tool's label is known, but not its time or result; and without facts that a replay lacks (failures of tools,
        elapsed seconds, policy versions: model and agent are part of the domain). ``"recorded"``: with all facts known
        before the next step.
    """

    trace: str
    folds: int
    seed: int
    points: str


@dataclass(frozen=True, slots=True)
class PredictorReport:
    """All results for one trace file.

    Attributes
    ----------
    rows
        The score of each method at each decision point, over the trajectories that reached it.
    orders
        Makespans relative to FCFS, means over the batches; `low` and `high`: range of random orders.
    latency
        Median milliseconds of one `predict` call, features and group facts included, and of the trees alone.
    """

    trace: str
    trajectories: int
    censored: int
    groups: int
    rows: Sequence[Row]
    orders: Sequence[Row]
    latency: Sequence[Row]


@dataclass(frozen=True, slots=True)
class _Held:
    """Predictions (median, q90 of log remaining) at all decision points of one trajectory, by method: (2, points)."""

    one: Finished
    by_method: dict[str, Floats]


def measure_predictor(job: PredictorJob) -> PredictorReport:
    """Measure one trace.

    Raises
    ------
    BadInput
        The file is unusable, or has fewer groups than folds.
    """
    path, settings = trace_file(Path(job.trace)), TreeSettings(seed=job.seed)
    if job.points == "asked":
        from heddle_dask.live.scheduler.warm_start import past_of_trace

        read = [finished_from_steps(one) for one in past_of_trace(path, 1.0, 1.0)]
    else:
        read = read_finished(path)
    # Scores do not use the durations of siblings, which some traces lack.
    finished = [replace(one, duration_s=NAN) for one in read]
    groups = by_group(finished)
    if len(groups) < job.folds:
        raise BadInput(f"trace file {str(path)!r}: {len(groups)} groups, too few for --folds {job.folds}: use fewer")
    held: list[_Held] = []
    for fold in range(job.folds):
        click.echo(f"{path.name}: fold {fold + 1} of {job.folds}", err=True)
        held += _held_fold(finished, groups, fold, job.folds, settings)
    return PredictorReport(
        trace=path.name,
        trajectories=len(finished),
        censored=sum(one.censored for one in finished),
        groups=len(groups),
        rows=_score_rows(held),
        orders=_order_rows(held, job.seed),
        latency=_latency_rows(read, settings),
    )


def _held_fold(
    finished: Sequence[Finished],
    groups: dict[str, list[Finished]],
    fold: int,
    folds: int,
    settings: TreeSettings,
) -> list[_Held]:
    """Fit on all groups but one part; predict the complete trajectories of that part at every decision point."""
    # The seed differs from that of the model's own folds, so that inner and outer parts differ.
    part = fold_numbers(groups, folds, settings.seed + 1)
    inside = [one for one in finished if part[one.group_id] != fold]
    tested = [one for one in finished if part[one.group_id] == fold and not one.censored]
    model = fit_model(inside, settings)
    if model is None or not tested:
        return []
    # Decision points after the last generated token need no prediction.
    points = [tuple(p for p in one.points if p.generated_tokens < one.generated_tokens) for one in tested]
    rows = [point for mine in points for point in mine]
    warm = [facts_then(row, groups[row.group_id], model.core.expected) for row in rows]
    predicted = _all_methods(model, inside, rows, warm)
    result, begin = [], 0
    for one, mine in zip(tested, points, strict=True):
        end = begin + len(mine)
        parts = {method: values[:, begin:end] for method, values in predicted.items()}
        result.append(_Held(replace(one, points=mine), parts))
        begin = end
    return result


def _all_methods(
    model: Model, inside: Sequence[Finished], rows: Sequence[Progress], warm: Sequence[GroupFacts]
) -> dict[str, Floats]:
    core, distributions = model.core, model.core.distributions
    cold_seen = core.see(rows, [NO_SIBLINGS] * len(rows))
    warm_seen = core.see(rows, warm)
    shares = np.array([[0.5], [0.9]])
    return {
        "xgboost cold": model.log_remaining(cold_seen),
        "xgboost warm": model.log_remaining(warm_seen),
        "group history": core.by_distributions(warm_seen),
        "prompt only": _prompt_only(model, inside, rows, cold_seen.done),
        "survival mean": distributions.constant.log_remaining(
            np.array(distributions.location.overall), cold_seen.done, shares
        ),
    }


def _prompt_only(model: Model, inside: Sequence[Finished], rows: Sequence[Progress], done: Floats) -> Floats:
    """Predictions from the prompt only: the first prediction, conditioned on the generated tokens."""
    first = _first_totals(model, [one.points[0] for one in inside])
    above = np.log1p([one.generated_tokens for one in inside]) - first
    residuals = ResidualDistribution.fit(above, np.array([one.censored for one in inside], dtype=bool))
    starts = [_at_start(row) for row in rows]
    return residuals.log_remaining(_first_totals(model, starts), done, np.array([[0.5], [0.9]]))


def _at_start(row: Progress) -> Progress:
    return Progress(
        trajectory_id=row.trajectory_id,
        group_id=row.group_id,
        domain=row.domain,
        policy_version=row.policy_version,
        prompt_tokens=row.prompt_tokens,
        message_tokens=row.message_tokens,
        context_tokens=row.prompt_tokens,
        max_steps=row.max_steps,
        elapsed_s=row.elapsed_s * 0.0,
    )


def _first_totals(model: Model, rows: Sequence[Progress]) -> Floats:
    seen = model.core.see(rows, [NO_SIBLINGS] * len(rows))
    return np.asarray(model.log_remaining(seen)[0])


def _score_rows(held: Sequence[_Held]) -> list[Row]:
    rows = []
    for steps in STEPS:
        told = [each for each in held if len(each.one.points) > steps]
        if len(told) < 5:
            continue
        done = np.array([each.one.points[steps].generated_tokens for each in told], dtype=np.float64)
        total = np.array([each.one.generated_tokens for each in told], dtype=np.float64)
        for method in METHODS:
            values = np.array([each.by_method[method][:, steps] for each in told]).T
            scored = score(done, total, values[0], values[1])
            rows.append(rounded_row({"steps_finished": steps, "method": method, "trajectories": len(told), **scored}))
    return rows


def _order_rows(held: Sequence[_Held], seed: int) -> list[Row]:
    """List scheduling, `JOBS_PER_SLOT` per slot, refreshed before every step; tools take no time."""
    rng = np.random.default_rng(seed)
    size = min(SLOTS * JOBS_PER_SLOT, len(held))
    slots = max(size // JOBS_PER_SLOT, 1)
    learned = [f"{method} by {order}" for method in METHODS[:2] for order in ORDERS]
    names = ["oracle", *learned, "prompt only by q90"]
    shares: dict[str, list[float]] = {name: [] for name in names}
    random_shares: list[list[float]] = []
    for _ in range(BATCHES):
        batch = [held[index] for index in rng.choice(len(held), size=size, replace=False)]
        steps = [_step_lengths(each.one) for each in batch]
        flat = [[0.0 - index] * len(each) for index, each in enumerate(steps)]
        base = makespan(steps, flat, slots)
        for name in names:
            shares[name].append(makespan(steps, [_order(each, name) for each in batch], slots) / base)
        draws = rng.random((RANDOM_ORDERS, size))
        fixed = [[[value] * len(each) for value, each in zip(draw, steps, strict=True)] for draw in draws.tolist()]
        random_shares.append([makespan(steps, values, slots) / base for values in fixed])
    rows: list[Row] = []
    for name, values in shares.items():
        mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / len(values) ** 0.5
        rows.append(_order_row(name, mean, mean - 2 * error, mean + 2 * error))
    means = np.array(random_shares).mean(axis=0)
    rows.append(_order_row("random fixed score", float(means.mean()), float(means.min()), float(means.max())))
    return rows


def _order_row(order: str, share: float, low: float, high: float) -> Row:
    return rounded_row({"order": order, "share_of_fcfs": share, "low": low, "high": high})


def _step_lengths(one: Finished) -> list[float]:
    tokens = [point.generated_tokens for point in one.points] + [one.generated_tokens]
    return [float(after - before) for before, after in pairwise(tokens)]


def _order(each: _Held, name: str) -> list[float]:
    if name == "oracle":
        return [float(each.one.generated_tokens - point.generated_tokens) for point in each.one.points]
    method, _, order = name.rpartition(" by ")
    median, q90 = each.by_method[method]
    if order == "median":
        return [float(value) for value in median]
    if order == "q90":
        return [float(value) for value in q90]
    spread = np.minimum((q90 - median) / Z90, 2.0)
    return [float(value) for value in median + spread**2 / 2]


def _latency_rows(finished: Sequence[Finished], settings: TreeSettings, repeats: int = 200) -> list[Row]:
    """Time `LearnedPredictor.predict` after a warm start from (at most 2,000 of) these trajectories."""
    from heddle_dask.predictors.learned import LearnedPredictor

    predictor = LearnedPredictor(settings)
    predictor.warm_start(finished[-2000:])
    points = [one.points[len(one.points) // 2] for one in finished]
    rows = []
    for count in BATCH_ROWS:
        batch = [points[index % len(points)] for index in range(count)]
        call_s = _median_s(partial(predictor.predict, batch), repeats)
        trees_s = NAN
        model = predictor.model
        if model is not None and model.core.trees is not None:
            seen = model.core.see(batch, [NO_SIBLINGS] * count)
            trees_s = _median_s(partial(model.core.by_trees, seen), repeats)
        rows.append(rounded_row({"rows": count, "call_ms": 1000 * call_s, "trees_ms": 1000 * trees_s}))
    return rows


def _median_s(call: Callable[[], object], repeats: int) -> float:
    call()
    spent = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began_s)
    return float(np.median(spent))
