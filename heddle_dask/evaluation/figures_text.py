"""Figures of an evaluation in words: the same on the terminal and on the page."""

from __future__ import annotations

from heddle_dask.evaluation.estimates import AttemptCosts
from heddle_dask.training.intervals import MeanInterval


def share_text(interval: MeanInterval | None) -> str:
    """A share with its interval in percent; a dash where it is unknown."""
    if interval is None:
        return "-"
    return f"{100 * interval.mean:.1f} [{100 * interval.low:.0f}, {100 * interval.high:.0f}]"


def reward_text(interval: MeanInterval | None) -> str:
    """A mean reward; a dash where it is unknown."""
    return "-" if interval is None else f"{interval.mean:.3f}"


def reward_interval_text(interval: MeanInterval | None) -> str:
    """A mean reward with its interval; a dash where it is unknown."""
    return "-" if interval is None else f"{interval.mean:.3f} [{interval.low:.2f}, {interval.high:.2f}]"


def per_attempt_texts(costs: AttemptCosts) -> dict[str, str]:
    """Costs of the mean attempt, by name."""
    attempts = max(1, costs.attempts)
    tokens = {"prompt": costs.prompt_tokens, "cached": costs.cached_tokens, "generated": costs.generated_tokens}
    seconds = {"LLM s": costs.llm_s, "tools s": costs.tool_s, "wall s": costs.wall_s}
    return {
        **{name: f"{value / attempts:,.0f}" for name, value in tokens.items()},
        **{name: f"{value / attempts:,.1f}" for name, value in seconds.items()},
    }
