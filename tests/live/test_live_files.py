"""Which files an order leaves that could not be carried out."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from worlds.live_agents import ToolAgent
from worlds.live_world import control_lines, emulated, run
from worlds.shared_cluster import shared_cluster

from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.journal_codec import replay
from heddle_dask.live.driver.files.run_writer import RunWriter
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.store import RunReader
from heddle_dask.strategies.presets import strategies_of_run

pytestmark = [pytest.mark.cluster]


@pytest.mark.parametrize("mode", ["overwrite", "create"])
def test_an_order_that_cannot_be_leaves_files_as_they_were(
    mode: Literal["overwrite", "create"], model_dir: str, tmp_path: Path
) -> None:
    """An older run is not touched, and none is left that would be in the way of the mended order."""
    out = tmp_path / "run.zarr"

    async def body() -> None:
        async with shared_cluster(engines=1) as client:

            def order(strategy: str, **chosen: Any) -> Rollout:
                chosen = {"engines": emulated(model_dir), **chosen}
                agent = ToolAgent(steps=1)
                return Rollout(client, env=agent, model=model_dir, strategy=strategy, **chosen)

            if mode == "overwrite":
                await order("slime", out=out).run(3)
            before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
            with pytest.raises(BadInput, match="unknown strategy"):
                await order("slimy", out=Output(out, mode)).run(2)
            async with order("slime") as holder:  # another run uses the engines, which are of another kind
                await holder.run(1)
                with pytest.raises(BadInput, match="uses the engines of this cluster"):
                    await order("slime", out=Output(out, mode), engines="vllm").run(2)
            assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
            mended = await order("slime", out=Output(out, mode)).run(2)
            assert mended.counts == {"completed": 2}

    run(body(), 100)
    assert len(RunReader(out)) == 2
    lines = control_lines(out)
    assert {"HostJoined", "EngineJoined"} <= {event[0] for event, _ in lines}, "from before the journal was there, too"
    assert list(replay(Controller(strategies_of_run(RunReader(out).metadata)), lines)) == []


def test_a_run_that_is_being_written_is_not_overwritten_and_later_nothing_is_lost(
    model_dir: str, tmp_path: Path
) -> None:
    out = tmp_path / "run.zarr"

    async def body() -> None:
        async with shared_cluster(engines=1) as client:
            spec = emulated(model_dir)
            chosen: dict[str, Any] = {"env": ToolAgent(steps=1), "model": model_dir, "engines": spec}
            async with Rollout(client, **chosen, out=Output(out, "overwrite")) as rollout:
                other = RunWriter(out, "create", {})
                with pytest.raises(BadInput, match="another process"):
                    await rollout.run(2)
                await other.close()
                assert (await rollout.run(3)).counts == {"completed": 3}
                await rollout.run(2)

    run(body(), 100)
    assert len(RunReader(out)) == 5
    lines = control_lines(out)
    assert list(replay(Controller(strategies_of_run(RunReader(out).metadata)), lines)) == []
