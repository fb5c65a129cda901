"""tiny-agent: tokenizer, chat template, experts and the checkpoint that ships. Needs no torch."""

from __future__ import annotations

import asyncio
import json
import math
import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.record_builders import plain_trajectory

from heddle_dask.environments.base import Task
from heddle_dask.environments.code_env import rules_of
from heddle_dask.environments.splits import problem_key, split_of
from scripts.tiny_agent.conversations import encode, make_conversations, make_environment
from scripts.tiny_agent.evaluate import held_out, summary, trained_rules
from scripts.tiny_agent.experts import make_expert
from scripts.tiny_agent.scripted_context import ScriptedContext
from scripts.tiny_agent.tokenizer import (
    END_OF_TURN,
    VOCABULARY,
    make_tokenizer,
    render,
    special_tokens,
    token_id,
)

CHECKPOINT = Path(__file__).parents[2] / "pipelines" / "tiny_agent" / "checkpoint"
NAMES = ["math", "math:hard", "code", "code:hard", "search", "search:hard"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def shipped() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(CHECKPOINT)


# Held-out tasks.


def test_the_shipped_agent_is_evaluated_on_rules_that_it_was_not_trained_on() -> None:
    """Its training set was split by whole prompts: rules of the test split were in it."""
    trained = trained_rules(CHECKPOINT)
    assert len(trained) == 1344 + 720

    def keys(tasks: Sequence[Task]) -> list[int]:
        return [problem_key(rules_of(task)) for task in tasks]

    code = make_environment("code", "test")
    assert sum(key in trained for key in keys(code.tasks(100, 1))) == 40
    for name in ("code", "code:hard"):
        tasks = held_out(make_environment(name, "test"), 100, 1, trained)
        assert len(tasks) == 100 and not trained.intersection(keys(tasks))
    math_tasks = make_environment("math", "test")
    assert held_out(math_tasks, 20, 1, trained) == list(math_tasks.tasks(20, 1))


def test_an_agent_without_a_list_of_rules_was_trained_on_the_train_split_alone(tmp_path: Path) -> None:
    assert trained_rules(tmp_path) == frozenset()


def test_an_attempt_that_failed_solved_nothing() -> None:
    failed, solved = plain_trajectory(0), plain_trajectory(1)
    row = summary("math", [solved, replace(failed, reward=None)])
    assert (row["env"], row["tasks"], row["solved"]) == ("math", 2, 0.5)
    assert row["steps_max"] == len(solved.steps) and row["context_tokens_mean"] == len(solved.branches[0])
    assert row["generated_tokens_mean"] == solved.generated_tokens > 0


# Tokenizer.


@given(text=st.text())
def test_any_text_comes_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= token < VOCABULARY for token in ids)


@given(data=st.binary())
def test_every_byte_is_the_token_of_its_value(tokenizer: Any, data: bytes) -> None:
    assert tokenizer.decode(list(data)) == data.decode("utf-8", errors="replace")
    text = data.decode("latin-1")
    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())


def test_special_tokens_are_one_token_each(tokenizer: Any) -> None:
    for token in special_tokens():
        assert tokenizer.encode(token, add_special_tokens=False) == [token_id(token)]
    assert len(tokenizer) == VOCABULARY
    assert tokenizer.eos_token_id == token_id(END_OF_TURN)


@given(first=st.text(), second=st.text())
def test_ids_of_a_text_do_not_depend_on_its_neighbours(tokenizer: Any, first: str, second: str) -> None:
    joined = tokenizer.encode(first + "<|im_end|>" + second, add_special_tokens=False)
    parts = [tokenizer.encode(part, add_special_tokens=False) for part in (first, second)]
    assert joined == [*parts[0], token_id(END_OF_TURN), *parts[1]]


# Chat template.


def test_template_only_appends(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "<think>\nt\n</think>\nA"},
        {"role": "tool", "content": "T"},
        {"role": "tool", "content": "T2"},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "V"},
    ]
    for number in range(1, len(messages)):
        head = render(tokenizer, messages[:number])
        assert render(tokenizer, messages[: number + 1]).startswith(head)
        assert render(tokenizer, messages[:number], prompt=True) == head + "<|im_start|>assistant\n"


def test_chat_template_of_the_package_takes_the_shipped_one() -> None:
    template = pytest.importorskip("heddle_dask.chat.template")
    chat = template.ChatTemplate.load(str(CHECKPOINT))
    chat.check_append_only()
    assert tuple(chat.end_token_ids) == (token_id(END_OF_TURN),)
    ids = chat.render([{"role": "user", "content": "hello"}])
    assert bytes(token for token in ids if token < 256).endswith(b"assistant\n")


# Experts.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_careful_expert_solves_every_task(name: str, split: Any) -> None:
    environment = make_environment(name, split)
    rng = random.Random(5)

    async def attempt_all() -> list[float | None]:
        tasks = environment.tasks(60, 11)
        contexts = [ScriptedContext(make_expert(task, rng)) for task in tasks]
        return [await environment.solve(*pair) for pair in zip(tasks, contexts, strict=True)]

    assert asyncio.run(attempt_all()) == [1.0] * 60


@pytest.mark.parametrize("name", NAMES)
def test_expert_in_the_real_sandbox_sees_the_same_conversation(name: str) -> None:
    environment = make_environment(name, "test")

    async def attempt(task: Any, in_process: bool) -> ScriptedContext:
        context = ScriptedContext(make_expert(task, random.Random(3)), in_process=in_process)
        assert await environment.solve(task, context) == 1.0
        return context

    async def compare() -> None:
        for task in environment.tasks(3, 2):
            quick, real = await attempt(task, True), await attempt(task, False)
            assert quick.messages == real.messages

    asyncio.run(compare())


@pytest.mark.parametrize("name", ["math:hard", "code:hard", "search:hard"])
def test_careless_expert_mostly_fails(name: str) -> None:
    environment = make_environment(name, "train")
    rng = random.Random(5)

    async def attempt_all() -> list[float | None]:
        tasks = environment.tasks(60, 11)
        contexts = [ScriptedContext(make_expert(task, rng, 1.0)) for task in tasks]
        return [await environment.solve(*pair) for pair in zip(tasks, contexts, strict=True)]

    assert sum(reward or 0.0 for reward in asyncio.run(attempt_all())) < 15


def test_trajectories_vary_in_length() -> None:
    environment = make_environment("math", "test")

    async def steps() -> list[int]:
        counts = []
        for task in environment.tasks(50, 0):
            context = ScriptedContext(make_expert(task, random.Random(1)))
            await environment.solve(task, context)
            counts.append(len(context.learned))
        return counts

    counts = asyncio.run(steps())
    assert min(counts) <= 3
    assert max(counts) >= 6


# Training text.


def test_conversations_are_what_the_template_renders(tokenizer: Any) -> None:
    environment = make_environment("search", "test")
    task = environment.tasks(1, 0)[0]
    context = ScriptedContext(make_expert(task, random.Random(0)))
    asyncio.run(environment.solve(task, context))
    whole = encode(context.messages, context.learned, tokenizer)
    assert tokenizer.decode(whole.token_ids) == render(tokenizer, context.messages)
    learned = tokenizer.decode(whole.token_ids[whole.learned])
    turns = [message["content"] for message in context.messages if message["role"] == "assistant"]
    wanted = [turn for turn, learn in zip(turns, context.learned, strict=True) if learn]
    assert learned == "".join(turn + END_OF_TURN for turn in wanted)


def test_spoilt_turns_are_not_learned(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "wrong"},
        {"role": "tool", "content": "error"},
        {"role": "assistant", "content": "right"},
    ]
    whole = encode(messages, [False, True], tokenizer)
    assert tokenizer.decode(whole.token_ids[whole.learned]) == "right" + END_OF_TURN


def test_training_text_follows_the_seed_and_holds_no_test_task(tokenizer: Any) -> None:
    first, again = (make_conversations(40, 9, tokenizer) for _ in range(2))
    assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in again]
    for conversation in first:
        text = tokenizer.decode(conversation.token_ids)
        prompt = text.split("<|im_start|>user\n")[1].split(END_OF_TURN)[0]
        assert split_of(prompt.partition("\nExample: ")[0]) == "train"
        assert len(conversation.token_ids) < 4096


# The checkpoint.


def read_header(path: Path) -> dict[str, Any]:
    """Header of a safetensors file: name, type and shape of each tensor."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def test_checkpoint_is_small() -> None:
    size = sum(path.stat().st_size for path in CHECKPOINT.iterdir())
    assert size <= 8_000_000
    shapes = [entry["shape"] for entry in read_header(CHECKPOINT / "model.safetensors").values()]
    parameters = sum(math.prod(shape) for shape in shapes)
    assert parameters < 2_000_000
    record = json.loads((CHECKPOINT / "training.json").read_text())
    assert record["parameters"] == parameters
    assert record["cpu_minutes_in_all"] <= 2 * 30, "two cores for half an hour"


def test_checkpoint_is_a_qwen3_with_the_tokenizer_of_the_code(shipped: Any, tokenizer: Any) -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] == VOCABULARY
    assert config["max_position_embeddings"] == 4096
    assert config["tie_word_embeddings"] is True
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"] == token_id(END_OF_TURN)
    assert shipped.get_vocab() == tokenizer.get_vocab()
    assert shipped.chat_template == tokenizer.chat_template


@settings(max_examples=30)
@given(text=st.text())
def test_shipped_tokenizer_gives_the_same_ids(shipped: Any, tokenizer: Any, text: str) -> None:
    assert shipped.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
