"""TRL's GRPOTrainer trains the shipped agent for real: vLLM on this machine follows its weights, step by step."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.vllm_command import VllmOptions
from heddle_dask.environments.loading import load_environment
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.programs.services import Budget
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.store import RunReader
from heddle_dask.training.trl_rollouts import environment_reward, trl_prompts

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
]

MODEL = Path(__file__).parents[2] / "pipelines/tiny_agent/checkpoint"
STEPS = 3


def test_trl_trains_the_shipped_agent_on_vllm(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from worlds.trl_checks import logprob_difference

    from pipelines.any_trainer.trl_live import TrlEngines

    tasks = load_environment("math").tasks(4, seed=3)
    seen: list[tuple[int, float]] = []
    with (
        LocalRolloutCluster(engines=1, tool_cpus=2, dashboard=False) as made,
        Client(made) as client,
        Rollout(
            client,
            env="math",
            model=MODEL,
            engines=EngineSpec(
                "vllm",
                str(MODEL),
                slots=8,
                max_model_len=1024,
                dtype="float32",
                options=VllmOptions(logprobs="processed"),
            ),
            budget=Budget(max_context_tokens=1024),
            out=tmp_path / "run.zarr",
        ) as rollout,
    ):
        engines = TrlEngines(rollout, tasks, str(tmp_path / "weights"))
        rollouts = engines.rollout_func()

        def rollout_func(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
            output = rollouts(prompts, trainer)
            seen.append((trainer.state.global_step, logprob_difference(trainer.model, output)))
            return output

        trainer = GRPOTrainer(
            model=str(MODEL),
            reward_funcs=environment_reward,
            args=GRPOConfig(
                output_dir=str(tmp_path / "trl"),
                per_device_train_batch_size=8,
                num_generations=4,
                max_steps=STEPS,
                learning_rate=1e-4,
                logging_steps=1,
                report_to=[],
                use_cpu=True,
                save_strategy="no",
                bf16=False,
                gradient_checkpointing=False,
                model_init_kwargs={"dtype": "float32"},
            ),
            train_dataset=Dataset.from_list(trl_prompts(task.task_id for task in tasks)),
            rollout_func=rollout_func,
        )
        trainer.train()
    assert [step for step, _ in seen] == list(range(STEPS))
    # In float32 the engine's logprobs are those of the weights in training, at every step.
    assert max(difference for _, difference in seen) < 1e-4
    versions = [
        set(np.unique(branch.policy_version[branch.loss_mask]).tolist())
        for record in RunReader(tmp_path / "run.zarr")
        for branch in record.branches
    ]
    assert sorted(versions, key=sorted) == [{step} for step in range(STEPS) for _ in range(8)]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """TRL and its packages warn of many things; this package's warnings are errors in the other tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
