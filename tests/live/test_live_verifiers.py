"""verifiers 0.4 with a task set of its own, unchanged: its programs ask the gateway, its rewards are stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from worlds.openenv_server import SITE, openenv_server
from worlds.verifiers_parts import parts_of_verifiers

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.cluster
ENV = """
[env.taskset]
id = "openenv"
base_url = "{url}"

[env.player]
max_turns = 3
"""


# A process of its own: it imports what the tests' environment lacks.
DRIVER = """
import json, sys
from distributed import Client
from heddle_dask import LocalRolloutCluster, Rollout
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.spec import EngineSpec

if __name__ == "__main__":
    model, script = sys.argv[1:]
    options = EmulatedOptions(cost={"seconds_per_token": 0.001}, script=script)
    engines = EngineSpec("emulated", model, slots=4, max_model_len=8192, options=options)
    with LocalRolloutCluster(1, tool_cpus=2, dashboard=False) as cluster, Client(cluster) as client:
        with Rollout(client, env="verifiers:echo.toml", model=model, engines=engines) as rollout:
            batch = rollout.run(1)
    rows = [(each.status, each.detail, each.reward, dict(each.reward_parts), len(each.steps)) for each in batch]
    print(json.dumps(rows))
"""


def test_its_task_set_for_openenv_is_played(model_dir: str, tmp_path: Path) -> None:
    if not (SITE / "verifiers").is_dir():
        pytest.skip("the wheel of verifiers is not in build/peers: `make test` brings it")
    parts = tmp_path / "parts"
    parts.mkdir()
    parts_of_verifiers(parts)
    (tmp_path / "script").write_text(json.dumps({"text": "hello"}))
    (tmp_path / "driver.py").write_text(DRIVER)
    with openenv_server(parts) as url:
        (tmp_path / "echo.toml").write_text(ENV.format(url=url))
        paths = [str(ROOT), str(parts), str(SITE)]
        done = subprocess.run(
            [sys.executable, "driver.py", model_dir, str(tmp_path / "script")],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-5000:])
    for status, detail, reward, reward_parts, steps in json.loads(done.stdout.splitlines()[-1]):
        assert (status, steps) == ("completed", 3), detail
        assert reward == pytest.approx(1.5) and reward_parts == {"openenv_reward": pytest.approx(1.5)}
