"""An evaluation on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from heddle_dask.evaluation.estimates import EvaluatedArm, PassEstimate, arm_difference
from heddle_dask.evaluation.figures_text import per_attempt_texts, reward_text, share_text


def arms_table(arms: Sequence[EvaluatedArm]) -> Table:
    """A row for each arm and domain. Only pass@1 has its interval, so that 80 columns are enough."""
    ks = sorted({k for arm in arms for k in arm.overall.pass_at})
    # Where rewards are 0 or 1, their mean is pass@1 again.
    has_reward = any(_tells_more(arm.overall) for arm in arms)
    shown = _table("arm", ["tasks", "samples", *(f"pass@{k} %" for k in ks), *(["reward"] if has_reward else [])])
    for arm in arms:
        shown.add_row(Text(arm.name, "bold"), *_figures(arm.overall, ks, has_reward))
        for domain, estimate in arm.by_domain.items():
            shown.add_row(Text(f"  {domain or 'other'}"), *_figures(estimate, ks, has_reward))
    return shown


def costs_table(arms: Sequence[EvaluatedArm]) -> Table:
    """What the mean attempt of each arm took."""
    shown = _table("mean attempt", list(per_attempt_texts(arms[0].costs)))
    for arm in arms:
        shown.add_row(Text(arm.name, "bold"), *per_attempt_texts(arm.costs).values())
    return shown


def _table(first: str, others: Sequence[str]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column(first, overflow="fold", min_width=16)
    for name in others:
        shown.add_column(name, justify="right", no_wrap=True)
    return shown


def difference_lines(arms: Sequence[EvaluatedArm]) -> Iterator[Text]:
    """How the pass@1 of each arm differs from that of the first, paired by task."""
    for arm in arms[1:]:
        found = arm_difference(arms[0], arm)
        if found is not None:
            said = f"pass@1 {share_text(found[0])} points over {found[1]} tasks of both"
            yield Text(f"{arm.name} less {arms[0].name}: {said}")


def failure_lines(arms: Sequence[EvaluatedArm]) -> Iterator[Text]:
    """Early ends by cause: those of the agent, of the infrastructure, of rewards."""
    for arm in arms:
        kinds = {
            "the agent's": arm.of_the_agent,
            "infrastructure, no samples": arm.of_the_infrastructure,
            "apart": arm.of_the_reward,
        }
        for kind, rows in kinds.items():
            for row in rows:
                said = f", first {row.first_trajectory}: {row.first_message}" if row.first_message else ""
                yield Text(f"{arm.name}: {row.count} {row.title} ({kind}){said}")


def _tells_more(estimate: PassEstimate) -> bool:
    one = estimate.pass_at.get(1)
    return estimate.reward is not None and (one is None or estimate.reward.mean != one.mean)


def _figures(estimate: PassEstimate, ks: Sequence[int], has_reward: bool) -> list[str]:
    first, *others = (estimate.pass_at.get(k) for k in ks) if ks else (None,)
    passes = [share_text(first), *("-" if each is None else f"{100 * each.mean:.1f}" for each in others)]
    reward = [reward_text(estimate.reward)] if has_reward else []
    return [f"{estimate.tasks}", f"{estimate.samples}", *passes, *reward]
