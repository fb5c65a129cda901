"""The report of ``heddle plan``: a table of all candidates, a line for each budget, the best of each budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from heddle_dask.sim.plan import GpuBudget, PlayedCandidate, ranked, ratios_by_seed

_SEARCHED = " (search)"


def plan_lines(
    conditions: Mapping[str, object],
    budgets: Sequence[GpuBudget],
    played: Sequence[Sequence[PlayedCandidate]],
    price: float | None,
) -> list[str]:
    """The report; `price` is per GPU hour, None if unknown."""
    lines = [", ".join(f"{name} {value}" for name, value in conditions.items())]
    lines += _candidates(budgets, played, price)
    best = [ranked(mine) for mine in played if mine]
    lines.append("")
    lines += [_in_words(mine, price) for mine in best]
    if len(budgets) > 1:
        lines.append("")
        lines += _budgets([mine[0] for mine in best], price)
    return lines


def plan_json(
    conditions: Mapping[str, object],
    budgets: Sequence[GpuBudget],
    played: Sequence[Sequence[PlayedCandidate]],
    price: float | None,
) -> dict[str, object]:
    """The JSON object: per budget the chosen candidate, all candidates, best first, and why degrees are infeasible."""
    found = []
    for budget, mine in zip(budgets, played, strict=True):
        order = ranked(mine)
        candidates = [one.figures(price) for one in order]
        found.append(
            {
                "gpus": budget.gpus,
                "chosen": {k: v for k, v in candidates[0].items() if k != "rows"} if order else None,
                "next_over_chosen": [round(r, 4) for r in ratios_by_seed(*order[:2])] if len(order) > 1 else None,
                "candidates": candidates,
                "refused": {str(degree): reason for degree, reason in budget.refused.items()},
            }
        )
    return {"conditions": {**conditions, "price_per_gpu_hour": price}, "budgets": found}


def _candidates(
    budgets: Sequence[GpuBudget], played: Sequence[Sequence[PlayedCandidate]], price: float | None
) -> list[str]:
    wide = max(len(_name(one)) for mine in played for one in mine)
    money = "" if price is None else "  price/1000"
    lines = [
        f"  GPUs  {'engines':{wide}}  makespan s median (least-most)  tokens/s  trajectories/h  GPU h/1000{money}  "
        "of bound  longest alone  by work s"
    ]
    for budget, mine in zip(budgets, played, strict=True):
        for rank, one in enumerate(ranked(mine)):
            spans = [rollout.makespan_s for rollout in one.rollouts]
            spread = f"{one.makespan_s:,.1f} ({min(spans):,.1f}-{max(spans):,.1f})"
            lines.append(
                f"{'*' if rank == 0 else ' '} {budget.gpus:>4}  {_name(one):{wide}}  {spread:>30}  "
                f"{_rates(one, price)}  {one.bound_share:8.1%}  {one.path_share:13.1%}  "
                f"{one.candidate.by_work_s:9,.1f}"
            )
            lines += _cut_off(one)
        for degree, reason in budget.refused.items():
            lines.append(f"  {budget.gpus:>4}  {f'TP{degree}':{wide}}  out: {reason}")
    return lines


def _cut_off(one: PlayedCandidate) -> list[str]:
    """A line below a candidate if some of its trajectories did not complete."""
    if all(rollout.completed == rollout.trajectories for rollout in one.rollouts):
        return []
    each = ", ".join(f"{rollout.completed:,d}" for rollout in one.rollouts)
    return [f"          only {each} (by seed) of {one.rollouts[0].trajectories:,d} trajectories completed"]


def _in_words(order: Sequence[PlayedCandidate], price: float | None) -> str:
    best = order[0]
    money = "" if price is None else f", {best.gpu_hours_per_thousand * price:,.2f} in money"
    said = (
        f"{best.gpus} GPUs: {best.candidate.engines}; {best.steps_per_s:,.1f} steps/s, "
        f"{best.trajectories_per_h:,.0f} trajectories/h, "
        f"{best.gpu_hours_per_thousand:,.2f} GPU hours{money} per 1,000 trajectories"
    )
    if len(order) > 1:
        ratios = ratios_by_seed(best, order[1])
        said += (
            f"; next best {order[1].candidate.engines}, {order[1].makespan_s / best.makespan_s:.2f} times as long "
            f"({min(ratios):.2f}-{max(ratios):.2f} by seed)"
        )
    return said


def _budgets(best: Sequence[PlayedCandidate], price: float | None) -> list[str]:
    """Speed-up of each budget over the first, and its share of a proportional speed-up."""
    wide = max(len("best engines"), *(len(one.candidate.engines) for one in best))
    money = "" if price is None else "  price/1000"
    lines = [
        f"  GPUs  {'best engines':{wide}}  makespan s  tokens/s  trajectories/h  GPU h/1000{money}  speed-up  "
        "of proportional  longest alone"
    ]
    for one in best:
        # By completed trajectories: a run that is cut off does less in the same time.
        first = best[0].trajectories_per_h
        speed_up = one.trajectories_per_h / first if first else math.nan
        share = speed_up * best[0].gpus / one.gpus
        lines.append(
            f"  {one.gpus:>4}  {one.candidate.engines:{wide}}  {one.makespan_s:10,.1f}  {_rates(one, price)}  "
            f"{speed_up:8.2f}  {share:15.0%}  {one.path_share:13.1%}"
        )
    return lines


def _rates(one: PlayedCandidate, price: float | None) -> str:
    hours = one.gpu_hours_per_thousand
    money = "" if price is None else f"  {hours * price:10,.2f}"
    return f"{one.tokens_per_s:8,.0f}  {one.trajectories_per_h:14,.0f}  {hours:10,.2f}{money}"


def _name(one: PlayedCandidate) -> str:
    return one.candidate.engines + (_SEARCHED if one.candidate.searched else "")
