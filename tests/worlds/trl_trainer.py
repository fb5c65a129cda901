"""TRL's own GRPOTrainer on a CPU, over rollouts of this package's form; as a script, one process of several.

Its engine is the model itself, which records logprobs, temperatures and versions as rollouts do.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from worlds.training_builders import sampled_step, trained_record
from worlds.trl_checks import logprob_difference

from heddle_dask.core.errors import BadInput
from heddle_dask.records.token_record import Attribution, TokenRecord
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.trl_rollouts import environment_reward, trl_prompts

MODEL = Path(__file__).parents[2] / "pipelines/tiny_agent/checkpoint"
TOKENS = 5
STEPS = 3


def small_model() -> Any:
    """The same random weights at each call."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(AutoTokenizer.from_pretrained(MODEL)),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


class PublishedModel:
    """Implements `TrainerSampler`: the model in float32 that was published last, sampling token by token."""

    temperature = 1.0

    def __init__(self, fails_at_step: int | None = None) -> None:
        self.published: list[int] = []
        self._model = small_model().eval()
        self._version = 0
        self._fails_at_step = fails_at_step
        self._random = torch.Generator().manual_seed(1)

    def publish(self, weights: Mapping[str, Any], step: int) -> None:
        if step == self._fails_at_step:
            raise BadInput("the engines are gone")
        self._model.load_state_dict({name: one.clone() for name, one in weights.items()})  # refuses pieces
        self._version = step
        self.published.append(step)

    def roll_out(self, task_ids: Sequence[str], samples: int) -> Iterator[TrajectoryRecord]:
        for task_id in task_ids:
            for index in range(samples):
                yield self._attempt(task_id, index)

    @torch.no_grad()
    def _attempt(self, task_id: str, index: int) -> TrajectoryRecord:
        """Two steps with an observation between them; the reward is the share of even token ids."""
        record, steps, sampled = TokenRecord(), [], []
        record.append([5 + int(task_id), 6, 7], Attribution.PROMPT)
        for step in range(2):
            if step:
                record.append([8, 9], Attribution.TOOL)
            start = len(record)
            for _ in range(TOKENS):
                logits = self._model(torch.tensor(record.token_ids.tolist())[None]).logits[0, -1].float()
                logprobs = logits.log_softmax(-1)
                token = int(torch.multinomial(logprobs.exp(), 1, generator=self._random))
                record.append_sampled([token], [float(logprobs[token])], self._version)
                sampled.append(token)
            steps.append(sampled_step(step, start, len(record)))
        reward = sum(token % 2 == 0 for token in sampled) / len(sampled)
        failed = (task_id, index) == ("1", 0)
        return replace(
            trained_record(f"{self._version}/{task_id}/{index}", task_id, None if failed else reward),
            task_id=task_id,
            sample_index=index,
            branches=(record,),
            steps=tuple(steps),
        )


def small_trainer(folder: Path, rollout_func: Any, peft_config: Any = None, **changes: Any) -> Any:
    """TRL's trainer over a model of random weights."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        model=small_model(),
        reward_funcs=environment_reward,
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=8 // PartialState().num_processes,
            num_generations=4,
            max_steps=3,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            bf16=False,
            gradient_checkpointing=False,
            **changes,
        ),
        train_dataset=Dataset.from_list(trl_prompts(str(n) for n in range(4))),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        rollout_func=rollout_func,
        peft_config=peft_config,
    )


def main(folder: Path) -> None:
    """Train a model whose weights are sharded over the processes, until its engine fails at step 2.

    Writes what each step of this process got.
    """
    from pipelines.any_trainer.launched_processes import trl_rollouts

    state = PartialState(cpu=True)
    # accelerate shards a model on accelerators only: it is told that this is one.
    state.distributed_type = DistributedType.MULTI_GPU
    rank = state.process_index

    @contextlib.contextmanager
    def opened() -> Iterator[PublishedModel]:
        assert rank == 0 and "RANK" not in os.environ
        yield PublishedModel(fails_at_step=2)

    with trl_rollouts(opened) as rollouts:

        def rollout_func(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
            output = rollouts(prompts, trainer)
            shared: list[Any] = [trainer.accelerator.get_state_dict(trainer.model)]  # whole in the main process
            torch.distributed.broadcast_object_list(shared)
            model = small_model().eval()
            model.load_state_dict(shared[0])
            noted = {
                "prompts": prompts,
                "parameters": sorted({type(one).__name__ for one in trainer.model.parameters()}),
                "difference": logprob_difference(model, output),
                **output,
            }
            (folder / f"rank-{rank}-step-{trainer.state.global_step}.json").write_text(json.dumps(noted))
            return output

        sharded = {"fsdp": True, "fsdp_config": {"version": 2}, "accelerator_config": {"use_configured_state": True}}
        small_trainer(folder, rollout_func, **sharded).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
