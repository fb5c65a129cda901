"""What the README promises, run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from worlds.live_world import emulated
from worlds.shared_cluster import shared_cluster_sync

import heddle_dask
from heddle_dask import Rollout

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_public_names_can_be_imported() -> None:
    for name in heddle_dask.__all__:
        assert getattr(heddle_dask, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        heddle_dask.Nonsense  # noqa: B018
    assert set(heddle_dask.__all__) <= set(dir(heddle_dask))


@pytest.mark.cluster
def test_the_python_example_runs(model_dir: str, tmp_path: Path) -> None:
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.S) if "solve" in block]
    program, _, use = example.partition("with LocalRolloutCluster")
    assert "rollout.run(" in use
    scope: dict[str, Any] = {"my_tool": lambda text: "42"}
    exec(program, scope)
    with shared_cluster_sync(engines=1) as client:
        rollout = Rollout(
            client,
            env=scope["solve"],
            model=model_dir,
            engines=emulated(model_dir),
            samples=2,
            out=tmp_path / "r.zarr",
        )
        batch = rollout.run(["What is 6 * 7?", "What is 40 + 2?"])
    assert batch.counts == {"completed": 4}
    assert set(record.reward for record in batch) <= {0.0, 1.0}
