"""The reward model that ships: how its pairs are made, and what the checkpoint is. Needs no torch."""

from __future__ import annotations

import json

import numpy as np
from worlds.model_files import SHIPPED_REWARD_MODEL

from heddle_dask import ServiceSpec
from scripts.reward_model.attempts import LONGEST_TOKENS, make_pairs
from scripts.tiny_agent.tokenizer import END_OF_TURN, make_tokenizer, token_id


def test_pairs_are_solved_and_failed_attempts_at_one_task() -> None:
    tokenizer = make_tokenizer()
    pairs = make_pairs(30, 0, "train", tokenizer)
    assert len(pairs) >= 5
    for pair in pairs:
        texts = [tokenizer.decode(ids.tolist()) for ids in (pair.solved, pair.failed)]
        solved, failed = (text.partition("<|im_start|>assistant")[0] for text in texts)
        assert solved == failed and texts[0] != texts[1]
        assert pair.solved[-1] == pair.failed[-1] == token_id(END_OF_TURN)
        assert pair.longest <= LONGEST_TOKENS
    again = make_pairs(30, 0, "train", tokenizer)
    assert all(np.array_equal(a.failed, b.failed) for a, b in zip(pairs, again, strict=True))


def test_the_checkpoint_is_small_and_says_what_it_is_worth() -> None:
    assert sum(file.stat().st_size for file in SHIPPED_REWARD_MODEL.iterdir()) < 3_000_000
    service = ServiceSpec("reward-model", SHIPPED_REWARD_MODEL, "cpu")
    service.check_model()
    assert service.answers == {"score"}
    record = json.loads((SHIPPED_REWARD_MODEL / "training.json").read_text())
    assert record["held_out"]["pairs"] >= 100
    assert record["held_out"]["pairs_ordered"] > 0.7
