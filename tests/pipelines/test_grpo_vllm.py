"""Real vLLM on weights of the trainer: it loads them as they are, and both give the same logprobs to tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from worlds.training_batches import AGENT, stored_batch

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import GenerateRequest, SamplingParams
from heddle_dask.engines.node_weights import NodeWeightsDirectory
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
STEP_TOKENS = 60
ADAPTER = PolicyVersion("adapter", 1)


@dataclass(frozen=True)
class Served:
    """The weights of a trainer, and the engine that serves them."""

    learner: Learner
    checkpoint: Path
    process: EngineProcess


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    torch.set_num_threads(1)
    learner = Learner(TrainerSpec(str(AGENT), str(folder / "checkpoints"), "a", learning_rate=1e-5))
    learner.train(stored_batch(folder, 1), PolicyVersion("a", 1))
    checkpoint = folder / "model"
    learner.export(checkpoint, learner.copied_weights())
    spec = EngineSpec(
        "vllm",
        str(checkpoint),
        slots=4,
        max_model_len=512,
        dtype="float32",
        options=VllmOptions(logprobs="processed"),
    )
    process = EngineProcess(spec, folder / "engine")
    try:
        asyncio.run(process.start(400.0))
        yield Served(learner, checkpoint, process)
    finally:
        asyncio.run(process.stop())


async def sampled(client: EngineClient, checkpoint: Path) -> tuple[list[TrainedSequence], set[PolicyVersion]]:
    """What the engine samples at both temperatures, and with which weights."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    asked = [(prompt, temperature) for prompt in prompts for temperature in TEMPERATURES]
    requests = [
        GenerateRequest(f"r{number}", prompt, SamplingParams(STEP_TOKENS, temperature=temperature, seed=number))
        for number, (prompt, temperature) in enumerate(asked)
    ]
    results = await asyncio.gather(*map(client.generate, requests))
    sequences = [
        TrainedSequence(
            number,
            number,
            np.array([*prompt, *result.token_ids], np.int64),
            len(prompt) + np.arange(len(result.token_ids)),
            np.zeros(len(result.token_ids), np.float32),
            np.array(result.logprobs, np.float32),
            np.full(len(result.token_ids), temperature, np.float32),
            np.ones(len(result.token_ids), np.int32),
        )
        for number, ((prompt, temperature), result) in enumerate(zip(asked, results, strict=True))
    ]
    spans = [span for result in results for span in result.version_spans]
    return sequences, {PolicyVersion(span.lineage, span.policy_version) for span in spans}


def differences(model: Any, sequences: list[TrainedSequence], *, packed: bool) -> np.ndarray:
    """How far torch's logprobs of the tokens are from the engine's."""
    with torch.no_grad():
        found = token_logprobs(model, sequences, torch.device("cpu"), packed=packed).logprobs.numpy()
    engine = np.concatenate([one.logprobs for one in sequences])
    assert len(engine) > 100 and engine.min() < -0.3, "the agent is not certain of all its tokens"
    return np.abs(found - engine)


def test_engine_and_trainer_agree_on_logprobs_at_both_temperatures(served: Served) -> None:
    async def scenario() -> list[TrainedSequence]:
        async with EngineClient(served.process.address) as client:
            return (await sampled(client, served.checkpoint))[0]

    found = differences(served.learner.policy.model, asyncio.run(scenario()), packed=True)
    print(f"{len(found)} tokens, largest difference {found.max():.1e}")
    assert found.max() < 1e-4


def test_an_engine_with_a_published_adapter_agrees_with_the_merged_model(served: Served, tmp_path: Path) -> None:
    """Last of the module: the engine goes over to the adapter."""
    base = str(served.checkpoint)
    spec = TrainerSpec(
        base, str(tmp_path / "adapters"), ADAPTER.lineage, learning_rate=1e-3, lora_rank=4, lora_alpha=8.0
    )
    learner = Learner(spec)
    learner.train(stored_batch(tmp_path, 1, lineage=ADAPTER.lineage), ADAPTER)
    uri = learner.publisher.publish(learner.copied_weights(), ADAPTER, str(tmp_path / "store"))
    copies = NodeWeightsDirectory(tmp_path / "node", base, "float32")

    async def scenario() -> tuple[list[TrainedSequence], set[PolicyVersion]]:
        async with EngineClient(served.process.address) as client:
            weights = copies.fetch(uri, ADAPTER, client.version, threading.Event())
            assert weights.nbytes < sum(file.stat().st_size for file in weights.path.glob("*.safetensors")) / 4
            await client.install_weights(str(weights.path), ADAPTER)
            return await sampled(client, served.checkpoint)

    sequences, versions = asyncio.run(scenario())
    assert versions == {ADAPTER}
    learner.export(tmp_path / "merged", learner.copied_weights())
    merged, plain = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (tmp_path / "merged", served.checkpoint)
    )
    found, without = (differences(model, sequences, packed=False) for model in (merged, plain))
    print(f"{len(found)} tokens, largest difference {found.max():.1e}, without the adapter {without.max():.1e}")
    assert found.max() < 1e-4
    assert without.max() > 0.01, "the adapter changes what the engine says"
