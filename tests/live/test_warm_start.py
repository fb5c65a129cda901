"""A predictor that starts warm has learnt from the moments at which a session asks."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from worlds.record_builders import plain_trajectory

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.environments.base import Context, Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.replay import ReplayEnvironment
from heddle_dask.live.driver.programs.attempts import attempts_of
from heddle_dask.live.scheduler.warm_start import warm_predictor
from heddle_dask.predictors.features import Finished, Progress
from heddle_dask.predictors.from_steps import finished_from_steps, past_of
from heddle_dask.predictors.known import KnownWork, Oracle
from heddle_dask.predictors.learned import LearnedPredictor
from heddle_dask.predictors.stored import save_predictor
from heddle_dask.records.store import RunStore
from heddle_dask.sim.fleet import SimulatedFleet, equal_engines
from heddle_dask.sim.world import SimulatedWorld
from heddle_dask.strategies.presets import build_strategies
from heddle_dask.workloads.planned import fit_into_context
from heddle_dask.workloads.synthetic import synthesize


async def solve(task: Task, ctx: Context) -> float:
    return 0.0


UNSCALED = {"token_scale": 1.0, "tool_scale": 1.0}


class Listening(Oracle):
    """Remembers what it was asked about, and what it was told."""

    def __init__(self) -> None:
        super().__init__(KnownWork())
        self.asked: dict[str, list[Progress]] = {}
        self.ended: dict[str, Finished] = {}

    def observe_running(self, progress: Progress) -> None:
        self.asked.setdefault(progress.trajectory_id, []).append(progress)

    def observe_finished(self, finished: Finished) -> None:
        self.ended[finished.trajectory_id] = finished


def test_the_points_of_the_past_are_those_at_which_a_session_asks() -> None:
    plans = [
        fit_into_context(plan, token_scale=0.1, tool_scale=1.0, max_context_tokens=4096)
        for plan in synthesize("coding", prompts=3, samples=4, seed=1)
    ]
    plans = [replace(plan, message_tokens=20, max_steps=40) for plan in plans]
    fleet = SimulatedFleet(equal_engines(2, load_profile("qwen3-8b-h100"), slots=8, max_context_tokens=4096))
    heard = Listening()
    strategies = build_strategies("heddle", overrides=["predictor=oracle", "preemption=none"])
    SimulatedWorld(strategies, fleet, plans, predictor=heard).run()
    for plan in plans:
        past = finished_from_steps(past_of(plan))
        # Of two that were asked after one step the later, when the tool's label was known, is the one that counts.
        asked = list({point.steps_finished: point for point in heard.asked[plan.trajectory_id]}.values())
        # After its last step a trajectory ends; whether it is asked about before that is a matter of timing.
        assert len(past.points) == len(plan.steps) and len(asked) >= len(plan.steps)
        for then, now in zip(past.points, asked, strict=False):
            assert math.isnan(then.elapsed_s) or len(plan.steps) == 1 or then.steps_finished == 0
            now = replace(now, at_s=then.at_s, elapsed_s=then.elapsed_s)
            nan = {"at_s": 0.0, "elapsed_s": 0.0}
            assert replace(now, **nan) == replace(then, **nan)
        ended = heard.ended[plan.trajectory_id]
        assert (past.generated_tokens, past.prompt_tokens) == (ended.generated_tokens, ended.prompt_tokens)
        assert not past.censored


def trace_line(number: int, tokens: int, *, complete: bool = True) -> str:
    step = {"gen_tokens": tokens, "obs_tokens": 50, "tool": "Read", "tool_s": 0.5}
    last = {**step, "tool": None}
    body = {"id": f"t{number}", "group": f"g{number % 5}", "prompt_tokens": 100, "complete": complete}
    body |= {"kind": "main", "model": "m", "user_tokens": 30, "max_turns": 9}
    return json.dumps({**body, "steps": [step] * (1 + number % 4) + [last]})


def test_a_trace_is_learnt_from_scaled(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl.gz"
    lines = [trace_line(number, 40 + number, complete=number % 7 > 0) for number in range(60)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    predictor = warm_predictor(str(path), {"token_scale": 0.5, "tool_scale": 0.1})
    assert predictor.model is not None
    learnt = predictor.learnt()
    finished = learnt.finished
    assert learnt.told == 60
    one = next(each for each in finished if each.trajectory_id == "t8")
    assert (one.domain, one.message_tokens, one.max_steps) == ("replay:some.jsonl.gz/main/m", 15, 9)
    assert (one.prompt_tokens, one.generated_tokens) == (50, 2 * 24)
    assert one.points[-1].steps_finished == 1 and one.points[-1].context_tokens == 50 + 24
    replayed = {task.task_id: task for task in ReplayEnvironment(path, token_scale=0.5).tasks(60, 0)}
    (attempt,) = attempts_of(FunctionEnvironment(solve, name="replay:some.jsonl.gz"), [replayed["t8"]], 1, 0, "")
    assert attempt.spec.domain == one.domain
    assert attempt.spec.prompt_key == one.prompt_key == one.points[0].prompt_key
    assert (attempt.spec.message_tokens, attempt.spec.max_steps) == (one.message_tokens, one.max_steps)
    assert {each.trajectory_id for each in finished if each.censored} == {f"t{n}" for n in range(0, 60, 7)}
    assert sum(each.points[-1].tools_s > 0 for each in finished) > 0


def test_a_store_is_learnt_from_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    store = RunStore.create(path, {})
    records = [plain_trajectory(number, steps=2 + number % 3) for number in range(20)]
    records[1] = replace(records[1], domain="math/sum", message_tokens=3, max_steps=8)
    failed, *others = records[5].actions
    records[5] = replace(records[5], actions=(replace(failed, status="raised"), *others))
    # A fork is another trajectory to the controller: nothing of it is learnt from the first branch.
    forked = records[4]
    (branch,) = forked.branches
    extra = replace(forked.steps[0], branch=1, generated_tokens=0, token_stop=forked.steps[0].token_start)
    forked = replace(
        forked,
        branches=(branch, branch.shared()),
        steps=(*forked.steps, extra),
        actions=(*forked.actions, replace(forked.actions[0], branch=1)),
    )
    store.append([*records[:4], forked, *records[5:]])
    store.close()
    learnt = warm_predictor(str(path), UNSCALED).learnt()
    finished = learnt.finished
    assert learnt.told == 20
    for record, one in zip(records, finished, strict=True):
        assert one.generated_tokens == sum(step.generated_tokens for step in record.steps)
        assert one.censored == (record.status != "completed")
        assert [point.steps_finished for point in one.points] == list(range(len(record.steps)))
        assert one.points[-1].tool_errors == (one is finished[5])
        assert one.points[-1].context_tokens <= record.steps[-1].token_start
    assert [(one.domain, one.message_tokens, one.max_steps) for one in finished[:2]] == [
        ("math", 0, 0),
        ("math/sum", 3, 8),
    ]


def test_a_saved_predictor_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "predictor"
    save_predictor(LearnedPredictor(), path)
    assert warm_predictor(str(path), UNSCALED).learnt() == LearnedPredictor().learnt()


@pytest.mark.parametrize("name", ["none.jsonl", "none", "empty.jsonl"])
def test_what_cannot_be_learnt_from_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(BadInput, match=name):
        warm_predictor(str(tmp_path / name), UNSCALED)
