"""TRL's own GRPOTrainer on a CPU, over rollouts of this package's form: synchronous, with the newest weights.

The engine of this test is the model in float32 that was published to disk last: it loads the published files, samples
from them token by token, and records logprobs, temperatures and versions as rollouts do.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds.training_builders import sampled_step, trained_record
from worlds.trl_checks import logprob_difference

from heddle_dask.records.token_record import Attribution, TokenRecord
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.trl_rollouts import REWARD_FIELD, TrlRollouts, environment_reward, trl_prompts

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

MODEL = Path(__file__).parents[2] / "pipelines/tiny_agent/checkpoint"
TOKENS = 5


class PublishedModel:
    """A publisher and the engine that follows it."""

    def __init__(self, folder: Path, model: Any) -> None:
        self._folder = folder
        self.published: list[int] = []
        self._load(model, 0)
        self._random = torch.Generator().manual_seed(1)

    def publish(self, model: Any, step: int) -> None:
        self._load(model, step)
        self.published.append(step)

    def _load(self, model: Any, step: int) -> None:
        from transformers import AutoModelForCausalLM

        model.save_pretrained(self._folder / str(step))
        self._model = AutoModelForCausalLM.from_pretrained(self._folder / str(step), dtype=torch.float32).eval()
        self._version = step

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


@pytest.mark.slow
def test_trl_trains_on_what_the_newest_weights_sampled(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer, engine, seen = small_trainer(tmp_path)
        before = {name: value.clone() for name, value in trainer.model.named_parameters()}
        trainer.train()
    assert engine.published == [
        1,
        2,
    ]  # step 0 are the weights of the engine, and after step 3 nothing is rolled out
    assert any(not torch.equal(value, before[name]) for name, value in trainer.model.named_parameters())
    assert len(seen) == 3
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
    assert len(losses) == 3 and all(abs(loss) < 10 for loss in losses)


def small_trainer(tmp_path: Path) -> tuple[Any, PublishedModel, list[tuple[dict[str, Any], float]]]:
    """TRL's trainer over a model of random weights, and what its rollout function returned."""
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    engine = PublishedModel(tmp_path / "published", model)
    rollouts = TrlRollouts(engine.roll_out, engine)
    seen: list[tuple[dict[str, Any], float]] = []

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        output = rollouts(prompts, trainer)
        seen.append((output, logprob_difference(trainer.model, output)))
        return output

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=environment_reward,
        args=GRPOConfig(
            output_dir=str(tmp_path / "trl"),
            per_device_train_batch_size=8,
            num_generations=4,
            max_steps=3,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(trl_prompts(str(n) for n in range(4))),
        processing_class=tokenizer,
        rollout_func=rollout_func,
    )
    return trainer, engine, seen
