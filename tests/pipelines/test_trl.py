"""TRL's own GRPOTrainer on a CPU: synchronous, with the newest weights, in one process and in two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from heddle_dask.training.trl_rollouts import REWARD_FIELD, TrlRollouts

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("lora", [False, True])
def test_trl_trains_on_what_the_newest_weights_sampled(lora: bool, tmp_path: Path) -> None:
    from peft import LoraConfig
    from worlds.trl_checks import logprob_difference
    from worlds.trl_trainer import STEPS, TOKENS, PublishedModel, small_trainer

    torch.set_num_threads(1)
    engine = PublishedModel()
    rollouts = TrlRollouts(engine)
    seen: list[tuple[dict[str, Any], float]] = []

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        output = rollouts(prompts, trainer)
        seen.append((output, logprob_difference(trainer.model, output)))
        return output

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = small_trainer(tmp_path, rollout_func, LoraConfig(target_modules="all-linear") if lora else None)
        before = {name: value.clone() for name, value in trainer.model.named_parameters()}
        trainer.train()
    # Step 0 are the weights of the engine, and after the last step nothing is rolled out.
    assert engine.published == [1, 2]
    assert any(not torch.equal(value, before[name]) for name, value in trainer.model.named_parameters())
    assert len(seen) == STEPS
    for output, difference in seen:
        assert len(output["prompt_ids"]) == 8
        assert {tuple(mask) for mask in output["env_mask"]} <= {
            (1,) * TOKENS + (0, 0) + (1,) * TOKENS,
            (0,),  # the attempt that failed
        }
        assert [reward is None for reward in output[REWARD_FIELD]] == [mask == [0] for mask in output["env_mask"]]
        # TRL's model gives the sampled tokens the engine's logprobs: the weights are the same.
        assert difference < 1e-4
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == STEPS and all(abs(loss) < 10 for loss in losses)


@pytest.mark.long
def test_two_processes_with_sharded_weights_share_what_one_rolls_out_and_end_together(tmp_path: Path) -> None:
    launch = [str(Path(sys.executable).parent / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2"]
    script = str(ROOT / "tests/worlds/trl_trainer.py")
    done = subprocess.run(
        [*launch, "--main_process_port", "0", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    # The engine of the main process fails at step 2, and the other process does not wait for it.
    assert (done.returncode, "BadInput: the engines are gone" in done.stderr) == (1, True), done.stderr[-3000:]
    assert len(list(tmp_path.glob("rank-*.json"))) == 4
    for step in range(2):
        ranks = [json.loads((tmp_path / f"rank-{rank}-step-{step}.json").read_text()) for rank in range(2)]
        # Each process has pieces of the model, and its own half of the attempts.
        assert [rank["parameters"] for rank in ranks] == [["DTensor"], ["DTensor"]]
        assert [len(rank["prompts"]) for rank in ranks] == [4, 4]
        completions = [tuple(one) for rank in ranks for one in rank["completion_ids"] if len(one) > 1]
        assert len(set(completions)) == len(completions)
        # The whole weights of this step give the engine's logprobs: they were sampled by them.
        assert max(rank["difference"] for rank in ranks) < 1e-4
        for rank in ranks:
            assert [reward is None for reward in rank[REWARD_FIELD]] == [mask == [0] for mask in rank["env_mask"]]
