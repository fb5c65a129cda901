"""Trajectories in the forms of others: read by their own classes, with every sampled token in one mask, once."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from worlds.read_by_others import SITE
from worlds.record_builders import make_action, make_step, plain_trajectory, steady

from heddle_dask.cli.main import heddle
from heddle_dask.core.errors import BadInput
from heddle_dask.records.reader import RunReader
from heddle_dask.records.store import RunStore
from heddle_dask.records.token_record import Attribution, TokenRecord
from heddle_dask.records.trajectory import StepRecord, TrajectoryRecord
from heddle_dask.training.exports.openai_chat import chat_lines
from heddle_dask.training.exports.openenv import openenv_trace
from heddle_dask.training.exports.token_facts import ExportedRun
from heddle_dask.training.exports.told_messages import told_branches
from heddle_dask.training.exports.trajectories import export_trajectories
from heddle_dask.training.exports.verifiers import verifiers_trace

RUN = ExportedRun("run", "models/tiny", "0.1.0")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
FIRST_REPLY = f"<think>\nplan\n</think>\n\nI call.{CALL}"


def decode(ids: Any) -> str:
    """One token for each character."""
    return "".join(map(chr, ids))


class Conversation:
    """A record whose tokens are characters."""

    def __init__(self) -> None:
        self.branches = [TokenRecord()]
        self.steps: list[StepRecord] = []

    def say(self, role: str, text: str, author: Attribution = Attribution.PROMPT) -> None:
        self.add(f"<|im_end|>\n<|im_start|>{role}\n", Attribution.TEMPLATE)
        self.add(text, author)

    def add(self, text: str, author: Attribution) -> None:
        self.branches[-1].append([ord(each) for each in text], author)

    def reply(self, text: str, logprob: float = -0.5) -> None:
        self.add("<|im_end|>\n<|im_start|>assistant\n", Attribution.TEMPLATE)
        self.go_on(text, logprob)

    def go_on(self, text: str, logprob: float = -0.5) -> None:
        branch = self.branches[-1]
        start = len(branch)
        branch.append_sampled([ord(each) for each in text], [logprob] * len(text), 3)
        step = make_step(len(self.steps), len(self.branches) - 1, start, len(branch))
        self.steps.append(replace(step, temperature=1.0))

    def fork(self, at: int | None = None) -> None:
        self.branches.append(self.branches[-1].shared(at))

    def record(self, **facts: Any) -> TrajectoryRecord:
        plain = plain_trajectory(0)
        values = {"branches": tuple(self.branches), "steps": tuple(self.steps), "actions": (make_action(0),), **facts}
        return replace(plain, **values)


def told_story(**facts: Any) -> TrajectoryRecord:
    """Thinking, a call, its result, an answer; and a second branch that was told another result."""
    talk = Conversation()
    talk.say("system", "Be good.")
    talk.say("user", "Add.")
    talk.reply(FIRST_REPLY)
    fork = len(talk.branches[0])
    talk.say("tool", "3", Attribution.TOOL)
    talk.reply("It is 3.", logprob=math.nan)
    talk.fork(fork)
    talk.say("tool", "4", Attribution.TOOL)
    talk.reply("It is 4.")
    return talk.record(**{"trajectory_id": "t/0", **facts})


def test_a_branch_is_read_back_as_a_conversation() -> None:
    main, other = told_branches(told_story(), decode)
    assert [(m.role, m.text) for m in main] == [
        ("system", "Be good."),
        ("user", "Add."),
        ("assistant", FIRST_REPLY),
        ("tool", "3"),
        ("assistant", "It is 3."),
    ]
    assert (main[2].thinking, main[2].answer, main[2].calls[0].name) == ("plan", "I call.", "add")
    assert [m.copied_from for m in other] == [(0, 0), (0, 1), (0, 2), None, None]
    assert [m.text for m in other[3:]] == ["4", "It is 4."]


def test_a_reply_of_another_attempt_is_an_assistants_message_that_teaches_nothing() -> None:
    talk = Conversation()
    talk.say("user", "Add.")
    talk.say("assistant", FIRST_REPLY, Attribution.PREFIX)
    talk.say("tool", "3", Attribution.TOOL)
    talk.reply("It is 3.")
    record = talk.record(metadata={"prefix": {"source": "t/9"}})
    messages = told_branches(record, decode)[0]
    assert [(m.role, m.is_sampled) for m in messages[1:]] == [
        ("assistant", False),
        ("tool", False),
        ("assistant", True),
    ]
    assert messages[1].text == FIRST_REPLY and messages[1].step is None
    (line,) = chat_lines(record, decode)
    assert [m["weight"] for m in line["messages"] if m["role"] == "assistant"] == [0, 1]
    assert verifiers_trace(record, RUN, decode)["info"]["prefix"] == {"source": "t/9"}


def test_a_reply_that_the_program_began_is_one_message() -> None:
    talk = Conversation()
    talk.say("user", "Add.")
    talk.say("assistant", "It ")
    talk.go_on("is 3.")
    (_, reply) = told_branches(talk.record(), decode)[0]
    assert (reply.role, reply.text, reply.is_sampled) == ("assistant", "It is 3.", True)
    assert reply.sampled_start - reply.content_start == 3


@st.composite
def forked_talks(draw: Any) -> TrajectoryRecord:
    talk = Conversation()
    talk.say("user", draw(st.text("ab", min_size=1, max_size=3)))
    for move in draw(st.lists(st.sampled_from(["reply", "replayed", "user", "tool", "fork"]), max_size=8)):
        if move == "reply":
            talk.reply(draw(st.text("xy", min_size=1, max_size=3)), draw(st.sampled_from([-0.25, math.nan])))
        elif move == "replayed":
            talk.say("assistant", draw(st.text("xy", min_size=1, max_size=3)), Attribution.PREFIX)
        elif move == "fork":
            talk.fork(draw(st.none() | st.integers(1, len(talk.branches[-1]))))
        else:
            talk.say(move, draw(st.text("cd", min_size=1, max_size=3)))
    return talk.record()


@steady
@given(forked_talks())
def test_every_sampled_token_is_in_one_mask_once_and_branches_have_their_tokens(record: TrajectoryRecord) -> None:
    known = sum(int((branch.loss_mask & (branch.logprobs < 0)).sum()) for branch in record.branches)
    trace = openenv_trace(record, RUN)
    assert sum(sum(turn["loss_mask"]) for turn in (trace or {"turns": []})["turns"]) == known
    graph = verifiers_trace(record, RUN, decode)
    assert sum(sum(node["mask"]) for node in graph["nodes"]) == known
    assert [len(node["logprobs"]) for node in graph["nodes"]] == [sum(node["mask"]) for node in graph["nodes"]]
    for branch, messages in zip(record.branches, told_branches(record, decode), strict=True):
        stops = [0, *(message.stop for message in messages)]
        assert [message.start for message in messages] == stops[:-1]
        assert sum(m.is_sampled and m.copied_from is None for m in messages) == sum(
            record.branches[step.branch] is branch for step in record.steps
        )
    learned = [m for line in chat_lines(record, decode) for m in line["messages"] if m.get("weight")]
    assert len(learned) == len(record.steps)


def exported(tmp_path: Path, form: str, *records: TrajectoryRecord, **options: Any) -> Path:
    with RunStore.create(tmp_path / "run.zarr", {"model": "/models/tiny", "heddle_dask": "0.1.0"}) as store:
        store.append(list(records))
    out = tmp_path / form
    export_trajectories(RunReader(tmp_path / "run.zarr"), out, form, decode, **options)
    return out


def read_by(kind: str, export: Path) -> list[Any]:
    wheel = "openenv" if kind == "trl" else kind
    if not (SITE / wheel).is_dir():
        pytest.skip(f"the wheel of {wheel} is not in build/peers: `make test` brings it")
    script = Path(sys.modules["worlds.read_by_others"].__file__ or "")
    done = subprocess.run([sys.executable, str(script), kind, str(export)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def test_harbor_reads_atif(tmp_path: Path) -> None:
    failed = told_story(status="failed", cause="agent", detail="KeyError", reward=None)
    records = [told_story(), replace(failed, trajectory_id="t/1")]
    first, second = sorted(
        read_by("harbor", exported(tmp_path, "atif", *records)), key=lambda one: one["trajectory_id"]
    )
    assert (
        first["schema_version"] == "ATIF-v1.8" and first["extra"]["reward"] == 0.0 and second["extra"]["reward"] is None
    )
    system, user, call, answer = first["steps"]
    assert (system["source"], user["source"], call["source"]) == ("system", "user", "agent")
    assert (call["message"], call["reasoning_content"]) == ("I call.", "plan")
    assert call["tool_calls"][0]["arguments"] == {"a": 1}
    assert call["observation"]["results"][0]["content"] == "3"
    assert call["observation"]["results"][0]["source_call_id"] == call["tool_calls"][0]["tool_call_id"]
    metrics = answer["metrics"]
    assert decode(metrics["completion_token_ids"]) == "It is 3." and len(metrics["logprobs"]) == 8
    assert decode(metrics["prompt_token_ids"]).endswith("<|im_start|>assistant\n")
    (branch,) = first["subagent_trajectories"]
    assert branch["trajectory_id"] == "t/0#1"
    assert [step["is_copied_context"] for step in branch["steps"]] == [True, True, True, None]
    assert branch["steps"][2]["observation"]["results"][0]["content"] == "4"


def test_openenv_reads_training_traces(tmp_path: Path) -> None:
    (trace,) = read_by("openenv", exported(tmp_path, "openenv", told_story()))
    texts = [decode(turn["completion_token_ids"]) for turn in trace["turns"]]
    assert texts == [FIRST_REPLY, "It is 3.", "It is 4."]
    # What the engine told no logprob of is context.
    assert [sum(turn["loss_mask"]) for turn in trace["turns"]] == [len(FIRST_REPLY), 0, 8]


@pytest.mark.slow  # TRL takes ten seconds to import
def test_trl_trains_on_each_sampled_token_of_the_traces_once(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    story = told_story()
    ((main, other),) = read_by("trl", exported(tmp_path, "openenv", story))
    for (ids, mask, logprobs), branch in zip((main, other), story.branches, strict=True):
        assert ids == branch.token_ids[: len(ids)].tolist()
        assert [logprob for logprob, trained in zip(logprobs, mask, strict=True) if trained] == [-0.5] * sum(mask)
    # The second branch repeats the reply of the first one as context, and the engine told no logprob of "It is 3.".
    assert [sum(main[1]), sum(other[1])] == [len(FIRST_REPLY), 8]


def test_verifiers_reads_traces(tmp_path: Path) -> None:
    records = [told_story(reward=0.5), replace(told_story(reward=None), trajectory_id="t/1")]
    first, second = read_by("verifiers", exported(tmp_path, "verifiers", *records))
    assert (first["reward"], second["record"]["rewards"]) == (0.5, {"reward": None})
    assert (first["turns"], first["output_tokens"]) == (3, len(FIRST_REPLY) + 16)
    story = told_story()
    for (ids, mask, logprobs), branch in zip(first["branches"], story.branches, strict=True):
        assert ids == branch.token_ids.tolist()
        assert len(mask) == len(logprobs) == len(ids)
    assert [sum(mask) for _, mask, _ in first["branches"]] == [len(FIRST_REPLY), len(FIRST_REPLY) + 8]


def test_openai_takes_the_messages(tmp_path: Path) -> None:
    types = pytest.importorskip("openai.types.chat")
    from pydantic import TypeAdapter

    others = (told_story(reward=1.0), told_story(trajectory_id="t/1"))
    kept = exported(tmp_path, "openai", *others, least_reward=1.0)
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len(lines) == 2  # the branches of the one that passed
    adapter = TypeAdapter(list[types.ChatCompletionMessageParam])
    for line in lines:
        adapter.validate_python(line["messages"])
    weights = [[m["weight"] for m in line["messages"] if m["role"] == "assistant"] for line in lines]
    assert weights == [[1, 1], [0, 1]]
    call = lines[0]["messages"][2]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    assert lines[0]["messages"][3]["tool_call_id"] == call["id"]


def test_an_export_refuses_what_is_there_and_a_run_without_its_tokenizer(tmp_path: Path) -> None:
    out = exported(tmp_path, "openenv", told_story())
    with pytest.raises(BadInput, match="exists: choose another path"):
        export_trajectories(RunReader(tmp_path / "run.zarr"), out, "openenv")
    outcome = CliRunner().invoke(heddle, ["export", str(tmp_path / "run.zarr"), str(tmp_path / "x"), "--to", "atif"])
    assert outcome.exit_code == 2 and "give --model DIR with its tokenizer" in outcome.stderr
    outcome = CliRunner().invoke(
        heddle, ["export", str(tmp_path / "run.zarr"), str(tmp_path / "x"), "--to", "openenv", "--json"]
    )
    assert json.loads(outcome.stdout)["documents"] == 1
