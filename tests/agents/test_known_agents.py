"""mini-swe-agent, openai-agents, Claude Code and Codex as their projects ship them, with the gateway for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds.known_agents import ANSWER, EVERY, known_agent, script_of
from worlds.live_world import run
from worlds.shared_cluster import shared_cluster

from heddle_dask import Rollout
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.command_agent import METADATA
from heddle_dask.records.trajectory import TrajectoryRecord

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
_CONTEXT_TOKENS = 400_000


def scripted(model: str, script: str) -> EngineSpec:
    """An engine that says what the script says, with room for the long prompts of these agents."""
    options = EmulatedOptions(
        cost={"seconds_per_token": 0.0005},
        emulation={"kv_capacity_tokens": 4 * _CONTEXT_TOKENS},
        script=script,
    )
    return EngineSpec("emulated", model, slots=4, max_model_len=_CONTEXT_TOKENS, options=options)


@pytest.mark.parametrize("name", EVERY)
def test_each_agent_uses_its_tools_and_finishes(name: str, model_dir: str, tmp_path: Path) -> None:
    agent, engines = known_agent(name), scripted(model_dir, script_of(name, tmp_path))

    async def body() -> TrajectoryRecord:
        async with (
            shared_cluster(1) as client,
            Rollout(client, env=agent, model=model_dir, engines=engines) as rollout,
        ):
            (record,) = await rollout.run(1)
        return record

    record: TrajectoryRecord = run(body())
    facts: dict[str, Any] = record.metadata[METADATA]
    assert (record.status, record.reward) == ("completed", 1.0), (record.detail, facts, record.metadata["gateway"])
    assert facts["exit_code"] == 0, facts
    assert len(record.steps) >= 2 and record.metadata["gateway"]["requests"] >= 2
    if facts.get("answer") is not None:
        assert facts["answer"] == ANSWER
    # A trajectory of its own is kept where the agent writes one.
    assert all(kept and "answer.txt" in kept for kept in facts.get("files", {}).values())
