"""Real vLLM on weights of the trainer: it loads them as they are, and both give the same logprobs to tokens.

Other tests use the same engine, since its start takes longer than they do.
"""

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
from live.test_weight_keeper import REAL_SCENARIOS
from transformers import AutoModelForCausalLM, AutoTokenizer
from worlds.trainer_process import TrainerProcess, trainer_process
from worlds.training_batches import AGENT, stored_batch
from worlds.weight_builders import model_with, perturbed
from worlds.weight_owner import PROMPT, Owner, owning_engine

from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.engines.address import LOOPBACK, EngineAddress, free_port
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import GenerateRequest, SamplingParams
from heddle_dask.engines.model_services.host import HostDevices, ModelHost
from heddle_dask.engines.model_services.served_process import ServiceClient
from heddle_dask.engines.model_services.spec import ServiceRefused, ServiceSpec
from heddle_dask.engines.model_services.vllm_backend import SleepingServer
from heddle_dask.engines.node_weights import NodeWeightsDirectory
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.vllm_command import VllmOptions
from heddle_dask.live.worker import engine_host
from heddle_dask.training.trainer_spec import TrainerSpec
from heddle_dask.weights.collective import CollectiveUri
from heddle_dask.weights.model_directory import model_facts
from pipelines.grpo.learner import Learner
from pipelines.grpo.sequences import TrainedSequence
from pipelines.grpo.token_logprobs import token_logprobs

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

QUESTIONS = ("What is 37+485?", "What is 12*34?", "Compute 918-273 and then add 45.", "What is 2+3?")
TEMPERATURES = (1.0, 0.7)
STEP_TOKENS = 60
MAX_MODEL_LEN = 2048
CHUNK = GpuChunk(0, 1)
BROADCAST_SEED = 7
ADAPTER = PolicyVersion("adapter", 1)


@dataclass(frozen=True)
class Served:
    """The weights of a trainer, and the engine that serves them."""

    learner: Learner
    checkpoint: Path
    spec: EngineSpec
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
        slots=8,
        max_model_len=MAX_MODEL_LEN,
        dtype="float32",
        options=VllmOptions(logprobs="processed", weight_transfer=True),
    )
    process = EngineProcess(spec, folder / "engine")
    try:
        asyncio.run(process.start(400.0))
        yield Served(learner, checkpoint, spec, process)
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


def test_a_model_service_of_vllm_answers_as_the_cpu_back_end(served: Served, tmp_path: Path) -> None:
    """Logprobs and judging: such a service is a server like this one."""
    tokens, chat = list(b"What is 2+3? It is 5."), [{"role": "user", "content": "What is 2+3?"}]
    spec = ServiceSpec("teacher", served.checkpoint, "cpu", max_tokens=256, batch=4, dtype="float32")

    async def scenario() -> None:
        host = ModelHost(HostDevices(gpus=1), tmp_path / "logs", lambda *what: None)
        client = ServiceClient("teacher", served.process.address)
        try:
            await host.load(spec, CHUNK, cold=True, keep=True)
            cpu, vllm = host.resident("teacher", CHUNK).server, SleepingServer(client, spec)
            wanted = await cpu.logprobs(tokens, 1)
            assert await vllm.logprobs(tokens, 1) == pytest.approx(wanted, abs=2e-3)
            assert await vllm.logprobs(tokens, 18) == pytest.approx(wanted[17:], abs=2e-3)
            with pytest.raises(ServiceRefused):
                await vllm.logprobs([1] * (MAX_MODEL_LEN + 44), 1)
            judged = await cpu.judge(chat, 64, 0.0)
            assert judged["finish_reason"] == "stop"
            assert await vllm.judge(chat, 64, 0.0) == judged
            for each in (cpu, vllm):
                assert (await each.judge(chat, 4, 0.0))["finish_reason"] == "length"
        finally:
            await client.close()
            await host.close()

    asyncio.run(asyncio.wait_for(scenario(), 300))


def test_an_engine_with_a_published_adapter_agrees_with_the_merged_model(served: Served, tmp_path: Path) -> None:
    """Behind the tests of the trainer's weights: the engine goes over to the adapter."""
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


async def goes_over_by_broadcast(owner: Owner, trainer: TrainerProcess) -> None:
    """A trainer's process broadcasts weights to the engine's, and the same weights from disk sample the same."""
    client = owner.client
    assert client is not None
    before, new = client.version, PolicyVersion("trained", 0)
    address = CollectiveUri(LOOPBACK, free_port(LOOPBACK), str(owner.directory / "manifests"))
    uri = await trainer.publish(new, str(address))
    assert not list((owner.directory / "manifests").rglob("*.safetensors"))
    sampling = SamplingParams(1700, 0.0, ignore_eos=True)
    step = asyncio.ensure_future(client.generate(GenerateRequest("across-2", PROMPT, sampling)))
    assert await owner.fetch_version(new, uri) == ""
    await owner.until_generating()
    report = await owner.install_version(new)
    assert report.cause == ""
    print(f"vllm, broadcast weights: paused {1000 * report.paused_s:.0f} ms")
    await owner.until_generating()
    await client.abort(["across-2"])
    assert [(span.lineage, span.policy_version) for span in (await step).version_spans] == [
        (before.lineage, before.number),
        ("trained", 0),
    ]
    received = await owner.greedy("received", PROMPT, 40)
    disk, model = PolicyVersion("disk", 1), owner.spec.model
    stored = owner.store.write(disk, perturbed(model, BROADCAST_SEED), model_facts(model))
    assert await owner.fetch_version(disk, stored) == ""
    assert (await owner.install_version(disk)).cause == ""
    loaded = await owner.greedy("loaded", PROMPT, 40)
    assert received.token_ids == loaded.token_ids and received.logprobs == loaded.logprobs
    assert "any more" in await owner.fetch_version(PolicyVersion("trained", 1), uri)


def test_weights_go_on_are_refused_and_restart_an_engine(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Last of the module: the host finds the engine started, starts it again after the failed load, and ends it."""
    running = [served.process]

    def next_process(*arguments: Any, **more: Any) -> EngineProcess:
        return running.pop() if running else EngineProcess(*arguments, **more)

    async def started(timeout_s: float) -> EngineAddress:
        return served.process.address

    monkeypatch.setattr(engine_host, "EngineProcess", next_process)
    monkeypatch.setattr(served.process, "start", started)
    base = served.spec.model
    trained = model_with(tmp_path / "trained", base, perturbed(base, BROADCAST_SEED))
    # It loads beside the first scenarios.
    with trainer_process(trained, tmp_path / "trainer", "trained") as trainer:

        async def all_of_them(owner: Owner) -> None:
            await owner.go_over(1)
            for scenario in REAL_SCENARIOS:
                await scenario(owner)
            await goes_over_by_broadcast(owner, trainer)

        owning_engine(served.spec, tmp_path, all_of_them)
