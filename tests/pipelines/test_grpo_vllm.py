"""Real vLLM on a checkpoint of the trainer: it loads as it is, and both give the same logprobs to the same tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from worlds.training_batches import AGENT, stored_batch

from heddle_dask.core.policy_version import PolicyVersion
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import GenerateRequest, GenerateResult, SamplingParams
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.vllm_command import VllmOptions
from heddle_dask.training.trainer_spec import TrainerSpec
from pipelines.grpo.learner import Learner
from pipelines.grpo.sequences import TrainedSequence
from pipelines.grpo.token_logprobs import token_logprobs

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

QUESTIONS = ("What is 37+485?", "What is 12*34?", "Compute 918-273 and then add 45.", "What is 2+3?")
TEMPERATURES = (1.0, 0.7)


def test_engine_and_trainer_agree_on_logprobs_at_both_temperatures(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    learner = Learner(TrainerSpec(str(AGENT), str(tmp_path / "checkpoints"), "a", learning_rate=1e-5))
    learner.train(stored_batch(tmp_path, 1), PolicyVersion("a", 1))
    checkpoint = learner.state.checkpoint
    assert checkpoint is not None
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    asked = [(prompt, temperature) for prompt in prompts for temperature in TEMPERATURES]
    results = asyncio.run(_generated(checkpoint, tmp_path, asked))
    sequences = [
        TrainedSequence(
            number,
            number,
            0.0,
            np.array([*prompt, *result.token_ids], np.int64),
            len(prompt) + np.arange(len(result.token_ids)),
            np.array(result.logprobs, np.float32),
            np.full(len(result.token_ids), temperature, np.float32),
            np.ones(len(result.token_ids), np.int32),
        )
        for number, ((prompt, temperature), result) in enumerate(zip(asked, results, strict=True))
    ]
    with torch.no_grad():
        policy = learner._policy
        found = token_logprobs(policy.model, sequences, policy.device, packed=True).logprobs.numpy()
    sampled = np.concatenate([one.logprobs for one in sequences])
    assert len(sampled) > 100 and sampled.min() < -0.3, "the agent is not certain of all its tokens"
    print(f"{len(sampled)} tokens, largest difference {np.abs(found - sampled).max():.1e}")
    assert np.abs(found - sampled).max() < 1e-4


async def _generated(model: Path, folder: Path, asked: list[tuple[list[int], float]]) -> list[GenerateResult]:
    spec = EngineSpec(
        "vllm",
        str(model),
        slots=4,
        max_model_len=512,
        dtype="float32",
        options=VllmOptions(logprobs="processed"),
    )
    engine = EngineProcess(spec, folder / "engine")
    try:
        address = await engine.start(400.0)
        async with EngineClient(address) as client:
            requests = [
                GenerateRequest(
                    f"r{number}", prompt, SamplingParams(60, temperature=temperature, seed=number)
                )
                for number, (prompt, temperature) in enumerate(asked)
            ]
            return list(await asyncio.gather(*map(client.generate, requests)))
    finally:
        await engine.stop()
