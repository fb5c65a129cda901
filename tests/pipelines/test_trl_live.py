"""The documented TRL program under ``accelerate launch`` in two processes: vLLM follows its weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from worlds.markdown_blocks import DOCS, ROOT, blocks_of

from heddle_dask.records.store import RunReader
from heddle_dask.training.trl_rollouts import REWARD_FIELD

pytest.importorskip("trl")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(1200),
]

MODEL = ROOT / "pipelines/tiny_agent/checkpoint"


def test_the_documented_program_trains_the_shipped_agent_in_two_processes(tmp_path: Path) -> None:
    (block,) = [each for each in blocks_of(DOCS / "training-data.md") if each.words[:1] == ("file=train_with_trl.py",)]
    (tmp_path / "train_with_trl.py").write_text(block.text)
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/model").symlink_to(MODEL)
    launch = [str(Path(sys.executable).parent / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2"]
    done = subprocess.run(
        [*launch, "--main_process_port", "0", str(ROOT / "tests/worlds/watched_trl.py"), "train_with_trl.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    sampled = [
        (int(version), tuple(branch.token_ids.tolist()))
        for record in RunReader(tmp_path / "runs/trl/run.zarr")
        for branch in record.branches
        for version in np.unique(branch.policy_version[branch.loss_mask])
    ]
    for step in range(2):
        ranks = [json.loads((tmp_path / f"rank-{rank}-step-{step}.json").read_text()) for rank in range(2)]
        trained = [
            tuple([*prompt, *completion])
            for rank in ranks
            for prompt, completion, reward in zip(
                rank["prompt_ids"], rank["completion_ids"], rank[REWARD_FIELD], strict=True
            )
            if reward is not None
        ]
        # The processes have disjoint shares of what this step's version sampled, and that alone.
        assert [len(rank["prompt_ids"]) for rank in ranks] == [8, 8]
        assert sorted(trained) == sorted(ids for version, ids in sampled if version == step)
        # In float32 the engine's logprobs are those of the weights in training.
        assert max(rank["difference"] for rank in ranks) < 1e-4
    assert (tmp_path / "weights-equal").read_text() == "1"
