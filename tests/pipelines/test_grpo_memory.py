"""What training takes of memory: chunks of logits, recomputed activations, shards that are read alone, bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GraniteConfig, Qwen3Config
from worlds.trainer_ranks import LENGTHS, follow, most_allocated, train, whole
from worlds.training_batches import training_batch

from heddle_dask import BadInput
from heddle_dask.cost.training_memory import LOGITS_CHUNK_TOKENS, TrainedModel, TrainerSetup, trainer_bytes
from heddle_dask.training.advantages import less_mean_over_std
from heddle_dask.training.trainer_spec import TrainerSpec
from pipelines.grpo import attention
from pipelines.grpo.attention import Segments, packed_attention
from pipelines.grpo.batch_step import BatchStep
from pipelines.grpo.losses import decoupled_clipped_loss
from pipelines.grpo.policy import Policy
from pipelines.grpo.sequences import TrainedSequence, trained_sequences
from pipelines.grpo.token_logprobs import CHUNK_TOKENS, token_logprobs

CPU = torch.device("cpu")
VOCABULARY = 320


@pytest.fixture(autouse=True, scope="module")
def one_process() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def model_of(folder: Path, config: Any, dtype: torch.dtype) -> Path:
    """A directory with random weights."""
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def qwen(**changed: Any) -> Qwen3Config:
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
    }
    return Qwen3Config(**{**shape, **changed})


def sequences(lengths: list[int]) -> list[TrainedSequence]:
    return trained_sequences(training_batch(1, [lengths]), less_mean_over_std, VOCABULARY, 4096)


def gradient(policy: Policy, packed: bool, chunk_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of all trained tokens, and the gradient of their sum weighed by place."""
    given = token_logprobs(policy.model, sequences([40, 31, 57]), CPU, packed=packed, chunk_tokens=chunk_tokens)
    (given.logprobs * torch.linspace(0.5, 1.5, len(given.logprobs))).sum().backward()
    found = torch.cat([whole(weight.grad).flatten() for weight in policy.trained])
    for weight in policy.trained:
        weight.grad = None
    return torch.cat([given.logprobs.detach(), given.entropy]), found


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_recomputing_change_neither_logprobs_nor_gradients(
    tmp_path: Path, packed: bool, lora: int, dtype: torch.dtype
) -> None:
    model = model_of(tmp_path / "model", qwen(tie_word_embeddings=True), dtype)
    spec = TrainerSpec(str(model), "unused", "a", packed=packed, lora_rank=lora, gradient_checkpointing=False)
    plain = Policy(spec, CPU)
    again = Policy(replace(spec, gradient_checkpointing=True), CPU)
    if lora:
        _open_adapters(plain, again)
    expected, direction = gradient(plain, packed, 1 << 30)
    assert direction.norm() > 0.1
    # Recomputed activations are the same bits.
    same, along = gradient(again, packed, 1 << 30)
    assert torch.equal(same, expected) and torch.equal(along, direction)
    for chunk in (1, 7):
        found, towards = gradient(again, packed, chunk)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        # Sums over chunks are of the type of the computation.
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        assert (towards - direction).norm() < bound * direction.norm()


def _open_adapters(*policies: Policy) -> None:
    """Second factors are 0 at first: then the first ones have no gradient."""
    for policy in policies:
        generator = torch.Generator().manual_seed(3)
        for weight in policy.trained:
            local: Any = weight.to_local() if hasattr(weight, "to_local") else weight
            local.data.normal_(0, 0.05, generator=generator)


def test_files_that_cannot_be_read_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tmp_path / "model", qwen(), torch.bfloat16)
    spec = TrainerSpec(str(model), "unused", "a")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "accelerate", None)
        with pytest.raises(BadInput, match="needs accelerate"):
            Policy(spec, CPU)
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(BadInput, match="cannot be loaded") as refused:
        Policy(spec, CPU)
    assert "\n" not in str(refused.value)


def test_a_model_whose_files_have_other_names_is_loaded_whole(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", qwen(), torch.bfloat16)
    expected = whole_weights(Policy(TrainerSpec(str(model), "unused", "a"), CPU))
    weights = {name.removeprefix("model."): tensor for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    found = whole_weights(Policy(TrainerSpec(str(model), "unused", "a"), CPU))
    assert all(torch.equal(found[name], expected[name]) for name in expected) and found.keys() == expected.keys()


def whole_weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: whole(weight) for name, weight in policy.model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_scales_its_logits_is_right_without_chunks(tmp_path: Path, dtype: torch.dtype) -> None:
    shape = qwen().to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = GraniteConfig(logits_scaling=3.0, **{key: shape[key] for key in keys})
    model = model_of(tmp_path / "model", config, dtype)
    policy = Policy(TrainerSpec(str(model), "unused", "a"), CPU)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    (one, *_) = sequences([40, 31])
    logits = plain(torch.from_numpy(one.token_ids)[None]).logits[0]
    scaled = logits[one.targets - 1] / torch.from_numpy(one.temperatures)[:, None]
    expected = scaled.log_softmax(-1)[torch.arange(len(one.targets)), one.token_ids[one.targets]]
    expected.sum().backward()
    bound = 1e-4 if dtype == torch.float32 else 0.03
    for _ in range(2):
        found = token_logprobs(policy.model, [one], CPU, packed=True, chunk_tokens=1).logprobs
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
        found.sum().backward()
        for weight, same in zip(policy.trained, plain.parameters(), strict=True):
            assert same.grad is not None
            assert (whole(weight.grad) - same.grad).norm() <= bound * same.grad.norm()
            weight.grad = None


@pytest.mark.parametrize("window", [None, 4])
def test_attention_with_lengths_is_asked_for_what_one_call_for_each_sequence_gives(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    torch.manual_seed(0)
    lengths = [5, 9, 2]
    query, key, value = (torch.randn(1, heads, sum(lengths), 8) for heads in (4, 2, 2))
    segments = Segments(lengths, CPU)
    module = torch.nn.Module()
    expected, _ = packed_attention(module, query, key, value, None, 0.3, segments, window)
    monkeypatch.setattr(attention, "takes_lengths", lambda query: True)
    monkeypatch.setattr(attention, "varlen_attn", plain_varlen)
    found, _ = packed_attention(module, query, key, value, None, 0.3, segments, window)
    torch.testing.assert_close(found, expected)


def test_attention_with_lengths_is_called_as_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "takes_lengths", lambda query: True)
    nowhere = torch.device("meta")
    inputs = [torch.empty(1, heads, 16, 8, device=nowhere, requires_grad=True) for heads in (4, 2, 2)]
    found, _ = packed_attention(torch.nn.Module(), *inputs, None, 0.3, Segments([5, 9, 2], nowhere), 4)
    found.sum().backward()
    assert found.shape == (1, 16, 4, 8)
    assert [each.grad is not None and each.grad.shape == each.shape for each in inputs] == [True] * 3


def plain_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    bounds_of_keys: torch.Tensor,
    longest: int,
    longest_of_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What torch documents of its kernel, which only GPUs have."""
    assert bounds.dtype == torch.int32 and longest == longest_of_keys == int(bounds.diff().max())
    assert enable_gqa and torch.equal(bounds, bounds_of_keys)
    before, after = window_size
    rows = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        for at in range(start, end):
            seen = slice(start if before < 0 else max(start, at - before), min(end, at + after + 1))
            heads = [
                torch.softmax(scale * key[seen, head // 2] @ query[at, head], 0) @ value[seen, head // 2]
                for head in range(query.shape[1])
            ]
            rows.append(torch.stack(heads))
    return torch.stack(rows)


@pytest.mark.long
def test_two_ranks_read_and_hold_a_half_each_and_train_as_one(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", qwen(), torch.bfloat16)
    one = TrainerSpec(str(model), "unused", "a")
    adapter = replace(one, lora_rank=4)
    specs = [replace(spec, ranks=2) for spec in (one, adapter)]
    torch.multiprocessing.spawn(follow, (specs, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    for spec, left, right in zip((one, adapter), first, second, strict=True):
        alone = train(spec, 0)
        files = 2 * sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(model).parameters())
        assert alone["read"] == files == left["read"] + right["read"]
        # The last shard of a weight may be smaller than the others.
        assert abs(left["held"] - alone["held"] / 2) < 0.02 * alone["held"]
        assert left["held"] + right["held"] == alone["held"]
        trained = sum(weight.numel() for weight in alone["weights"])
        frozen = files // 2 if spec.lora_rank else 0
        assert alone["held"] == 12 * trained + 2 * frozen, "gradients are gone between steps"
        tokens = sum(map(sum, LENGTHS)) // 2
        formula = beyond_states(
            model, trained // 2, TrainerSetup(ranks=2, lora_rank=spec.lora_rank, pass_tokens=tokens)
        )
        for half in (left, right):
            # By chance a layer is gathered before the one ahead of it is let go.
            assert 0.9 * half["allocated"] < formula < 1.4 * half["allocated"]
        for found, expected in zip(left["weights"], alone["weights"], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert left["metrics"] == pytest.approx(alone["metrics"], rel=2e-2, abs=1e-3)


def beyond_states(model: Path, held: int, setup: TrainerSetup) -> float:
    """Bytes that a step allocates by the formula: weights and moments of the trained parameters are there before it."""
    shape = TrainedModel.of_config(json.loads((model / "config.json").read_text()))
    computed = trainer_bytes(shape, setup)
    return computed.total - computed.workspace - computed.states + 4 * held


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 4])
def test_the_formula_of_memory_is_just_above_what_a_step_allocates(tmp_path: Path, lora: int) -> None:
    assert LOGITS_CHUNK_TOKENS == CHUNK_TOKENS
    config = qwen(hidden_size=128, intermediate_size=384, head_dim=32)
    model = model_of(tmp_path / "model", config, torch.bfloat16)
    found, formula = [], []
    for tokens in (1024, 3072):
        spec = TrainerSpec(str(model), "unused", "a", lora_rank=lora, micro_batch_tokens=tokens)
        policy = Policy(spec, CPU)
        optimizer = torch.optim.AdamW(policy.trained)
        step = BatchStep(policy, optimizer, decoupled_clipped_loss, None, 0, 0)
        step.run(sequences([tokens // 4 + 1] * 4))
        found.append(most_allocated(lambda step=step, tokens=tokens: step.run(sequences([tokens // 4 + 1] * 4))))
        trained = sum(weight.numel() for weight in policy.trained)
        formula.append(beyond_states(model, trained, TrainerSetup(lora_rank=lora, pass_tokens=tokens)))
    for measured, computed in zip(found, formula, strict=True):
        assert measured < computed < 1.4 * measured
    assert formula[1] - formula[0] == pytest.approx(found[1] - found[0], rel=0.2), "bytes of a token"
