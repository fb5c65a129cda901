"""Trajectories by simple laws, for the tests of the predictors."""

from __future__ import annotations

import random

from heddle_dask.predictors.features import Finished, Progress
from heddle_dask.predictors.trees import TreeSettings

# Small enough for a test, large enough to learn a simple law.
SMALL = TreeSettings(rounds=25, depth=3, learning_rate=0.25, max_rows=3000, folds=2)


def trajectory(
    name: str,
    group: str = "g",
    *,
    steps: int = 4,
    tokens: int = 100,
    prompt: int = 50,
    label: str = "bash",
    policy: int = 0,
    censored: bool = False,
    start_s: float = float("nan"),
) -> Finished:
    """`steps` equal steps of `tokens` tokens and 3 s each, tool included."""
    points = tuple(
        Progress(
            trajectory_id=name,
            group_id=group,
            domain="law",
            policy_version=policy,
            prompt_tokens=prompt,
            context_tokens=prompt + index * tokens,
            generated_tokens=index * tokens,
            steps_finished=index,
            step_tokens=(tokens,) * min(index, 4),
            observed_tokens=(0,) * min(index, 4),
            tool_labels=(label,) * min(index, 4),
            tool_times_s=(1.0,) * min(index, 4),
            tools_s=float(index),
            elapsed_s=3.0 * index,
            at_s=start_s + 3.0 * index,
        )
        for index in range(steps)
    )
    return Finished(
        trajectory_id=name,
        group_id=group,
        domain="law",
        policy_version=policy,
        prompt_tokens=prompt,
        generated_tokens=steps * tokens,
        duration_s=3.0 * steps,
        censored=censored,
        started_at_s=start_s,
        ended_at_s=start_s + 3.0 * steps,
        points=points,
    )


def by_formula(count: int, seed: int = 0, *, prefix: str = "t", groups: int | None = None) -> list[Finished]:
    """Trajectories whose number of steps follows from the label of their tool and a little chance."""
    rng = random.Random(seed)
    groups = groups or max(count // 4, 1)
    result = []
    for index in range(count):
        label = rng.choice(("short", "long"))
        steps = rng.randint(2, 4) if label == "short" else rng.randint(14, 20)
        result.append(
            trajectory(
                f"{prefix}{index}",
                f"{prefix}-g{index % groups}",
                steps=steps,
                tokens=rng.randint(80, 120),
                prompt=rng.randint(20, 400),
                label=label,
            )
        )
    return result
