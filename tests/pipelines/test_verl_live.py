"""The documented verl program in two processes on CPUs: verl's own engine trains, and vLLM follows its weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from worlds.markdown_blocks import DOCS, ROOT, blocks_of

from heddle_dask.records.store import RunReader

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1200),
]

SITE = ROOT / "build/verl/site"


def test_verls_engine_trains_the_shipped_agent_in_two_processes(tmp_path: Path) -> None:
    if not (SITE / "verl").is_dir():
        pytest.skip("verl is not in build/verl: `make test-long` brings it")
    (block,) = [each for each in blocks_of(DOCS / "training-data.md") if each.words[:1] == ("file=train_with_verl.py",)]
    (tmp_path / "train_with_verl.py").write_text(block.text)
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/model").symlink_to(ROOT / "pipelines/tiny_agent/checkpoint")
    torchrun = str(Path(sys.executable).parent / "torchrun")
    done = subprocess.run(
        [torchrun, "--nproc_per_node", "2", str(ROOT / "tests/worlds/verl_on_cpu.py"), "train_with_verl.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(SITE)]),
            "CUDA_VISIBLE_DEVICES": "",
            "VERL_PLATFORM": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    sampled = Counter(
        (int(version), tuple(branch.token_ids.tolist()))
        for record in RunReader(tmp_path / "runs/verl/run.zarr")
        for branch in record.branches
        for version in np.unique(branch.policy_version[branch.loss_mask])
    )
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [len(steps) for steps in ranks] == [2, 2]
    for step, both in enumerate(zip(*ranks, strict=True)):
        # The weights of this step sampled all of it, and no process has what another one has.
        trained = Counter((step, tuple(ids)) for one in both for ids in one["trained"])
        assert trained and trained <= sampled
        assert [one["parameters"] for one in both] == [["DTensor"], ["DTensor"]]
        # In float32 the engine's logprobs are those of the weights in training.
        assert max(one["difference"] for one in both) < 1e-4
        assert both[0]["grad_norm"] == both[1]["grad_norm"] > 0
        assert all(one["published"] for one in both)
