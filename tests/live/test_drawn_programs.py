"""Whatever a program does: what is stored is what was sampled, and from any part of its journal it runs to the same."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.drawn_programs import DrawnAgent, draw_program, play, refused
from worlds.journal_records import read_journal
from worlds.live_agents import RecordingWorker
from worlds.live_world import emulated, run
from worlds.scripted_plane import ScriptedPlane, context_on, sampled
from worlds.shared_cluster import shared_cluster

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.nouns import StepRequest
from heddle_dask.live.driver.files.resume import recorded_results
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.options import Budget, Sampling
from heddle_dask.live.driver.programs.context import LiveContext
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.driver.session import open_session
from heddle_dask.live.wire.messages import StepCall, StepResult
from heddle_dask.records.journal import Journal
from heddle_dask.records.store import RunReader, RunStore
from heddle_dask.records.token_record import Attribution
from heddle_dask.records.trajectory import TRAJECTORY_FINISHED, TrajectoryRecord
from heddle_dask.strategies.presets import Strategy

# Forks of an admitted trajectory must not wait for its end.
ONE_AT_A_TIME = Strategy("sticky-least-loaded", ["admission=at-most,alive=1"])


REFUSED = {
    "top_k": "generate: top_k is -1: use a whole number of at least 1, or 0 for no limit",
    "max_tokens": "generate: max_tokens is -1: use a whole number of at least 1 and below 2**31",
    "an image": "append: the content has a part of type image: only text is supported, so give a text",
    "no JSON": "metadata: not JSON-able: Object of type object is not JSON serializable",
}


class DrawingPlane(ScriptedPlane):
    """Answers every step by what is drawn from its identity: whole, cut short by a preemption, or lost."""

    def __init__(self) -> None:
        super().__init__()
        self._lost: set[str] = set()

    async def step(self, call: StepCall, request: StepRequest) -> StepResult:
        # What differs between a run and its resumption, such as the order of branches or the number of lost attempts,
        # must not matter; a step that goes on after a preemption has another seed.
        name = f"{call.step_id.trajectory_id}/{call.step_id.step_index}/{call.sampling.seed}"
        rng = random.Random(name)
        count = rng.randint(1, call.sampling.max_tokens)
        ids = [rng.randint(32, 126) for _ in range(min(count, 40))]
        if rng.random() < 0.1 and name not in self._lost:
            self._lost.add(name)
            self.script = [lambda call, context: StepResult(status="engine-lost", message="gone")]
        elif rng.random() < 0.2:
            self.script = [sampled(*ids[: rng.randint(0, len(ids))], status="aborted", reason="abort")]
        else:
            self.script = [sampled(*ids)]
        return await super().step(call, request)


def told(contexts: list[LiveContext]) -> list[Any]:
    """What is stored of branches, as far as it is the same in every run."""
    return [
        (
            context.record.token_ids.tolist(),
            context.record.attribution.tolist(),
            context.record.policy_version.tolist(),
            [(s.step_index, s.token_start, s.token_stop, s.finish_reason, s.max_tokens) for s in context.steps],
            [(a.action_index, a.after_step, a.label, a.status) for a in context.actions],
        )
        for context in contexts
    ]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.floats(0, 1))
def test_a_program_runs_to_the_same_record_from_any_part_of_its_journal(
    model_dir: str, seed: int, share: float
) -> None:
    program = draw_program(random.Random(seed))
    template, budget = ChatTemplate.load(model_dir), Budget(max_steps=6, max_context_tokens=300)

    def played(recorded: Any, journal: list[Any]) -> tuple[LiveContext, ScriptedPlane]:
        plane = DrawingPlane()
        ctx = context_on(plane, model_dir, budget=budget, template=template, recorded=recorded, journal=journal)
        asyncio.run(play(program, ctx))
        return ctx, plane

    journal: list[Any] = []
    whole, plane = played(None, journal)
    contexts = list(whole.branches())
    for context in contexts:
        for step in context.steps:
            assert context.record.token_ids[: step.token_start].tolist() in plane.seen
            assert context.record.loss_mask[step.token_start : step.token_stop].all()
        own = sum(step.generated_tokens for step in context.steps)
        assert int(context.record.loss_mask.sum()) == own
    kept = json.loads(json.dumps(journal[: round(share * len(journal))]))
    again, _ = played(recorded_results(kept).get("t"), [])
    assert told(list(again.branches())) == told(contexts)


def check_against_rows(record: TrajectoryRecord, rows: list[Any]) -> None:
    """Each step of each branch was seen by an engine as stored; only what follows a stop string is missing."""
    mine = [row for row in rows if row["trajectory"].partition("#")[0] == record.trajectory_id]
    assert len(mine) == sum(1 + step.preemptions for step in record.steps)
    for step in record.steps:
        branch = record.branches[step.branch]
        ids = branch.token_ids.tolist()
        fits = [
            row
            for row in mine
            if row["step"] == step.step_index
            and row["seen"] == ids[: step.token_start]
            and row["sampled"][: step.generated_tokens] == ids[step.token_start : step.token_stop]
        ]
        assert fits, f"step {step.step_index} of branch {step.branch}"
        assert any(len(row["sampled"]) == step.generated_tokens or step.finish_reason == "stop" for row in fits)


@pytest.mark.cluster
def test_drawn_programs_are_stored_as_sampled_and_resumed_to_the_same_records(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_path = tmp_path / "seen.jsonl"
    monkeypatch.setattr(open_session, "RolloutWorker", lambda spec, watch: RecordingWorker(spec, str(seen_path)))
    out, cut = tmp_path / "run.zarr", tmp_path / "cut.zarr"

    async def body() -> None:
        async with shared_cluster() as client:

            def rollout(where: Output) -> Rollout:
                return Rollout(
                    client,
                    env=DrawnAgent(),
                    model=model_dir,
                    engines=emulated(model_dir, seconds_per_token=0.0005),
                    # Without preemption: the rest of a step is drawn with a seed of its own.
                    strategy=ONE_AT_A_TIME if where.mode == "create" else "sticky-least-loaded",
                    samples=2,
                    seed=3,
                    budget=Budget(max_steps=8, max_context_tokens=600),
                    sampling=Sampling(seeded=True),
                    out=where,
                )

            refusals = Rollout(client, env=refused, model=model_dir, engines=emulated(model_dir))
            for record in await refusals.run([*REFUSED]):
                assert (record.status, record.cause, record.reward) == ("failed", "agent", None)
                prompt = [*REFUSED][int(record.task_id.removeprefix("task-"))]
                assert record.detail.splitlines()[0] == f"BadInput: {REFUSED[prompt]}"
                assert "Traceback" in record.detail
                assert record.metadata == ({} if prompt == "no JSON" else {"asked": record.task_id})
            await rollout(Output(out)).run(12)
            cut_run(out, cut)
            await rollout(Output(cut, "resume")).run(12)

    run(body())
    whole = {record.trajectory_id: record for record in RunReader(out)}
    again = {record.trajectory_id: record for record in RunReader(cut)}
    assert {r.detail for r in (*whole.values(), *again.values())} == {""}
    assert len(whole) == 24 and sum(len(record.branches) for record in whole.values()) > 30
    assert again.keys() == whole.keys()
    for name, record in whole.items():
        for one, other in zip(record.branches, again[name].branches, strict=True):
            assert one == other
        assert (again[name].reward, again[name].reward_parts) == (0.5, {"format": 1.0})
        assert again[name].metadata == record.metadata
        assert record.metadata["program"] >= 2
        for branch in record.branches[1:]:
            assert next(branch.segments()).attribution in (Attribution.SHARED, Attribution.TEMPLATE)
    rows = [json.loads(line) for line in seen_path.read_text().splitlines()]
    first = sum(1 + step.preemptions for record in whole.values() for step in record.steps)
    for record in whole.values():
        check_against_rows(record, rows[:first])


def cut_run(out: Path, cut: Path) -> None:
    """A run as a driver leaves it that was killed: an empty store, and the first half of the results."""
    records = list(read_journal(journal_path(out)))
    results = [(kind, body) for kind, body in records if kind in ("step", "action")]
    RunStore.create(cut, RunReader(out).metadata).close()
    with Journal.create(journal_path(cut)) as journal:
        for kind, body in records:
            if kind == "session":
                journal.append(kind, body)
        for kind, body in results[: len(results) // 2]:
            journal.append(kind, body)
        assert all(kind != TRAJECTORY_FINISHED for kind, _ in results)
