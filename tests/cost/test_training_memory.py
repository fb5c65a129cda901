"""Memory and seconds of a trainer: by hand, against what fitted and did not on a GPU, and trends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.published import config_of, gpu_of
from heddle_dask.cost.training_memory import (
    TrainedModel,
    TrainerSetup,
    most_pass_tokens,
    step_flops,
    train_step_s,
    trainer_bytes,
)

EIGHT = TrainedModel.of_config(config_of("qwen3-8b"))
SMALL = TrainedModel.of_config(
    {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
)
LLAMA = TrainedModel.of_config(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
)
H100_BYTES = 80e9

setups = st.builds(
    TrainerSetup,
    ranks=st.integers(1, 16),
    lora_rank=st.sampled_from([0, 16]),
    pass_tokens=st.integers(1, 65_536),
    item_bytes=st.sampled_from([2, 4]),
    recompute=st.booleans(),
    reference=st.booleans(),
)


def test_parameters_are_those_of_the_hub() -> None:
    assert EIGHT.parameters == 8_190_735_360
    assert EIGHT.outside == 2 * 151_936 * 4096 + 4096
    assert SMALL.parameters == 1_720_574_976, "counted by PyTorch (gpu results of 2026-11-26)"


def test_bytes_of_eight_ranks_by_hand() -> None:
    found = trainer_bytes(EIGHT, TrainerSetup(ranks=8))
    assert found.states == 16 * 8_190_735_360 / 8
    layer = (8_190_735_360 - EIGHT.outside) / 36
    assert found.gathered == pytest.approx(2 * (EIGHT.outside + 2 * layer) + 6 * layer + 2 * EIGHT.outside)
    # The layers' inputs, and one layer: 2 bytes for each element of 8,192 tokens.
    assert found.activations == 8192 * 2 * (36 * 4096 + 12 * 4096 + 5 * (4096 + 1024) + 6 * 12288)
    assert found.logits == 0.0, "the layer that is computed again is larger"
    assert found.workspace == 2e9


def test_bytes_of_an_adapter_by_hand() -> None:
    found = trainer_bytes(EIGHT, TrainerSetup(lora_rank=32))
    # PEFT's count for rank 32 on all linear modules of Qwen3-8B.
    assert EIGHT.adapter(32) == 87_293_952
    assert found.states == 16 * 87_293_952 + 2 * 8_190_735_360


def test_full_8b_fits_eight_gpus_of_80_gb_and_not_one_and_an_adapter_fits_one() -> None:
    assert trainer_bytes(EIGHT, TrainerSetup(ranks=8)).needed_memory_bytes < H100_BYTES
    assert trainer_bytes(EIGHT, TrainerSetup(ranks=8, pass_tokens=40_960)).needed_memory_bytes < H100_BYTES
    assert trainer_bytes(EIGHT, TrainerSetup(lora_rank=32)).needed_memory_bytes < H100_BYTES
    assert trainer_bytes(EIGHT, TrainerSetup(ranks=1)).needed_memory_bytes > 160e9
    assert most_pass_tokens(EIGHT, TrainerSetup(ranks=1), H100_BYTES) == 0


def test_what_ran_out_of_79_gib_on_an_h100_and_what_did_not() -> None:
    """Random 1.7B, two sequences of 3,000 tokens a pass, a quarter of them prompt, all logits at once (2026-11-26)."""
    setup = TrainerSetup(pass_tokens=6000, recompute=False, logits_chunk_tokens=4500)
    assert trainer_bytes(SMALL, replace(setup, item_bytes=4)).total > 79.18 * 2**30
    assert trainer_bytes(SMALL, setup).total < 79.18 * 2**30


def test_a_published_peak_is_met_within_5_percent() -> None:
    """torchtitan, docs/performance.md, table 2: FSDP over 8, a sequence of 32,768, full checkpointing, all logits."""
    setup = TrainerSetup(ranks=8, pass_tokens=32_768, logits_chunk_tokens=32_768)
    assert trainer_bytes(LLAMA, setup).total / 2**30 == pytest.approx(83.9, rel=0.05)


@given(setups)
def test_more_ranks_need_no_more_and_longer_passes_no_less(setup: TrainerSetup) -> None:
    needed = trainer_bytes(EIGHT, setup).total
    assert trainer_bytes(EIGHT, replace(setup, ranks=setup.ranks + 1)).total <= needed
    assert trainer_bytes(EIGHT, replace(setup, pass_tokens=setup.pass_tokens + 1024)).total >= needed
    assert trainer_bytes(EIGHT, replace(setup, reference=True)).total >= needed


@given(setups, st.floats(10e9, 200e9))
def test_the_largest_pass_fits_and_the_next_does_not(setup: TrainerSetup, memory_bytes: float) -> None:
    most = most_pass_tokens(EIGHT, setup, memory_bytes)
    assert 0 <= most <= 1024 * 1024
    if most:
        assert trainer_bytes(EIGHT, replace(setup, pass_tokens=most)).needed_memory_bytes <= memory_bytes
    if most < 1024 * 1024:
        assert trainer_bytes(EIGHT, replace(setup, pass_tokens=most + 1024)).needed_memory_bytes > memory_bytes


def test_operations_by_hand() -> None:
    tokens, squared = 1000.0, 1000.0**2
    attention = 2 * 36 * 4096 * squared
    assert step_flops(EIGHT, TrainerSetup(), tokens, squared) == 8 * EIGHT.parameters * tokens + 4 * attention
    plain = TrainerSetup(recompute=False)
    assert step_flops(EIGHT, plain, tokens, squared) == 6 * EIGHT.parameters * tokens + 3 * attention
    twice = TrainerSetup(passes=2, forwards=1)
    assert step_flops(EIGHT, twice, tokens, squared) == 18 * EIGHT.parameters * tokens + 9 * attention
    adapter = TrainerSetup(lora_rank=32)
    assert step_flops(EIGHT, adapter, tokens, squared) == 6 * EIGHT.parameters * tokens + 4 * attention


def test_the_share_of_the_peak_lies_below_a_published_rate() -> None:
    """torchtitan, table 1: 5,762 tokens/s on each H100 without compilation, sequences of 8,192."""
    seconds = train_step_s(LLAMA, TrainerSetup(ranks=1), gpu_of("h100"), 5762, 5762 * 8192)
    assert 1.0 < seconds < 2.0


def test_a_mixture_of_experts_is_refused() -> None:
    with pytest.raises(BadInput, match="mixture of experts"):
        TrainedModel.of_config(config_of("qwen3-30b-a3b"), "qwen3-30b-a3b")
