"""Draws the figures of `how-it-decides.md` from simulated rollouts: `python docs/figures/draw.py`, 15 s."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from heddle_dask.sim.clusters import cluster_of, with_choices
from heddle_dask.sim.rollout import SimulatedRollout
from heddle_dask.sim.sweep import SimulatedWorkload, parse_arms, run_jobs, sweep_jobs
from heddle_dask.views.drawing.svg import Line, line_chart

HERE = Path(__file__).parent
EXACT = "heddle:predictor=oracle"


def rollouts(workload: str, strategies: Sequence[str], *, tp: int, slots: int, count: int) -> list[SimulatedRollout]:
    """One rollout of each strategy, seed 0, on 8 H100 with Qwen3-14B."""
    cluster = with_choices(cluster_of("hopper8"), tp=tp, slots=slots, tables=())
    fleet = cluster.fleet("qwen3-14b", max_context_tokens=40_960)
    work = SimulatedWorkload(workload, count, 16, 40_960, 1.0, 1.0)
    return list(run_jobs(sweep_jobs(work, fleet, parse_arms(",".join(strategies)), [0], warm=True)))


def draw(name: str, shown: dict[str, SimulatedRollout]) -> None:
    """Trajectories that have not ended, over time, one line for each strategy."""
    lines = []
    for title, one in shown.items():
        ends = sorted(one.completed_s)
        left = [(0.0, float(len(ends)))]
        # A point for each hundredth of them is enough for the eye, and the last ones.
        every = max(1, len(ends) // 100)
        left += [
            (at, float(len(ends) - number))
            for number, at in enumerate(ends, start=1)
            if number % every == 0 or number > len(ends) - every
        ]
        lines.append(Line(f"{title}: {one.makespan_s:,.0f} s", left))
    chart = line_chart(lines, x_label="virtual seconds", y_label="trajectories left")
    head, _, rest = chart.partition(">")
    style = "<style>text { font: 12px sans-serif }</style><rect width='100%' height='100%' fill='white'/>"
    (HERE / f"{name}.svg").write_text(f"{head}>{style}{rest}\n")


def main() -> None:
    """Draw them all."""
    order = rollouts(
        "coding",
        [f"{EXACT}:admission=unlimited{rest}" for rest in ("", ":scheduling=fcfs", ":scheduling=group-first")],
        tp=2,
        slots=16,
        count=400,
    )
    draw("order", dict(zip(("longest-first", "fcfs", "group-first"), order, strict=True)))
    capped = "sticky-least-loaded:admission=at-most,alive=150"
    memory = rollouts("search", [EXACT, "heddle", capped, "sticky-least-loaded"], tp=1, slots=100, count=800)
    titles = (
        "kv-fit, exact lengths",
        "kv-fit, learned predictor",
        "sticky-least-loaded, at most 150",
        "sticky-least-loaded",
    )
    draw("admission", dict(zip(titles, memory, strict=True)))


if __name__ == "__main__":
    main()
