"""Spans at a real receiver: what they say, what they do not, and that no failure of a collector reaches the run."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from worlds.live_agents import ToolAgent
from worlds.live_world import emulated, run
from worlds.otlp_receiver import OtlpReceiver, values
from worlds.run_builders import timed_trajectory
from worlds.shared_cluster import shared_cluster

import heddle_dask
from heddle_dask.cli.main import heddle
from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.inputs import telemetry as telemetry_module
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.inputs.telemetry import SpanSender, Telemetry
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.trajectory import TrajectoryRecord


def _decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def _sender(telemetry: Telemetry, notes: list[str]) -> SpanSender:
    clock: Callable[[], float] = lambda: 100.0  # noqa: E731
    return SpanSender(telemetry, session="s1", model="tiny", decode=_decode, clock=clock, note=notes.append)


def _sent(receiver: OtlpReceiver, records: Sequence[TrajectoryRecord], telemetry: Telemetry | None = None) -> list[str]:
    notes: list[str] = []
    sender = _sender(telemetry or Telemetry(endpoint=receiver.endpoint), notes)
    for record in records:
        sender.finished(record)
    sender.close(30)
    return notes


def test_a_trajectory_is_a_trace_with_a_span_for_each_step_and_action() -> None:
    with OtlpReceiver() as receiver:
        assert _sent(receiver, [timed_trajectory(number) for number in range(3)]) == []
    assert {path for path, _ in receiver.requests} == {"/v1/traces"} and receiver.services == {"heddle"}
    assert len(receiver.spans) == 3 * 7 and len({span.trace_id for span in receiver.spans}) == 3
    assert len({(span.trace_id, span.span_id) for span in receiver.spans}) == 21
    mine = [span for span in receiver.spans if span.trace_id == receiver.spans[0].trace_id]
    root, *children = mine
    assert root.name == "invoke_agent math" and not root.parent_span_id
    assert all(span.parent_span_id == root.span_id for span in children)
    assert all(root.start_time_unix_nano <= s.start_time_unix_nano <= s.end_time_unix_nano for s in mine)
    assert root.end_time_unix_nano - root.start_time_unix_nano == pytest.approx(9.5e9, abs=1000)
    said = values(root)
    assert (said["gen_ai.operation.name"], said["gen_ai.conversation.id"]) == ("invoke_agent", "t0")
    assert (said["heddle.status"], said["heddle.reward"], said["gen_ai.usage.output_tokens"]) == (
        "completed",
        0.0,
        15,
    )
    step = next(span for span in children if span.name == "chat tiny")
    assert step.kind == step.SPAN_KIND_CLIENT and step.end_time_unix_nano - step.start_time_unix_nano == 2_000_000_000
    asked = values(step)
    assert (asked["gen_ai.request.model"], asked["gen_ai.usage.input_tokens"]) == ("tiny", 5)
    assert (asked["gen_ai.response.finish_reasons"], asked["heddle.decode_s"]) == (["stop"], 1.0)
    # Not kept in this record, so not said.
    assert "gen_ai.request.temperature" not in asked and "gen_ai.request.max_tokens" not in asked
    action = next(span for span in children if span.name == "execute_tool python")
    assert values(action)["gen_ai.tool.name"] == "python" and action.kind == action.SPAN_KIND_INTERNAL


def test_no_text_is_sent_unless_asked_for() -> None:
    failed = replace(timed_trajectory(0), status="failed", cause="agent", detail="ValueError: the secret")
    with OtlpReceiver() as receiver:
        _sent(receiver, [failed])
        assert "secret" not in str(receiver.spans) and "messages" not in str(receiver.spans)
        assert receiver.spans[0].status.code == receiver.spans[0].status.STATUS_CODE_ERROR
        assert values(receiver.spans[0])["error.type"] == "agent"
        receiver.spans.clear()
        _sent(receiver, [failed], Telemetry(endpoint=receiver.endpoint, texts=True))
    root, first, second, *_ = receiver.spans
    assert root.status.message == "ValueError: the secret"
    (given,) = json.loads(values(first)["gen_ai.input.messages"])
    assert given == {"role": "user", "parts": [{"type": "text", "content": "0 1 2 3 4"}]}
    (answer,) = json.loads(values(first)["gen_ai.output.messages"])
    assert answer["parts"][0]["content"] == "0 1 2 3 4" and answer["finish_reason"] == "stop"
    (observed,) = json.loads(values(second)["gen_ai.input.messages"])
    assert observed["role"] == "tool"


def test_headers_and_a_path_of_ones_own() -> None:
    with OtlpReceiver() as receiver:
        telemetry = Telemetry(endpoint=f"{receiver.endpoint}/x/y", headers={"X-Key": "k"}, service="mine")
        assert _sent(receiver, [timed_trajectory(0)], telemetry) == []
    ((path, headers),) = receiver.requests
    assert path == "/x/y" and headers["X-Key"] == "k" and receiver.services == {"mine"}


def test_a_collector_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_module, "_PAUSE_S", 0.001)
    with OtlpReceiver([503, 429]) as receiver:
        notes: list[str] = []
        sender = _sender(Telemetry(endpoint=receiver.endpoint), notes)
        sender.finished(timed_trajectory(0))
        while not receiver.spans:
            time.sleep(0.005)
        sender.close(30)
    assert notes == [] and len(receiver.requests) == 3 and len(receiver.spans) == 7


def test_no_proxy_leads_to_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:1")
    with OtlpReceiver() as receiver:
        assert _sent(receiver, [timed_trajectory(0)], Telemetry(endpoint=receiver.endpoint)) == []
        assert len(receiver.requests) == 1
    monkeypatch.setattr(telemetry_module, "_PAUSE_S", 0.001)
    notes: list[str] = []
    sender = _sender(Telemetry(endpoint="http://collector.invalid"), notes)
    sender.finished(timed_trajectory(0))
    while not sender.dropped:
        time.sleep(0.005)
    sender.close(30)
    assert "http://collector.invalid through the proxy http://127.0.0.1:1: " in notes[0]


def test_failures_are_one_line_and_a_count() -> None:
    with OtlpReceiver([401] * 9) as receiver:
        notes: list[str] = []
        sender = _sender(Telemetry(endpoint=receiver.endpoint), notes)
        for number in range(3):
            sender.finished(timed_trajectory(number))
            while sender.dropped <= number:
                time.sleep(0.005)
        sender.close(30)
    first, last = notes
    assert "spans cannot be sent" in first and "Unauthorized" in first and "the run goes on" in first
    assert last.endswith(f"the spans of 3 trajectories were not sent to {receiver.endpoint}")


def test_nobody_listens_and_a_queue_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_module, "MOST_WAITING", 2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        notes: list[str] = []
        sender = _sender(Telemetry(endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}"), notes)
        for number in range(50):
            sender.finished(timed_trajectory(number))
        sender.close(30)
    assert sender.sent == 0 and sender.dropped == 50
    assert "Cannot connect to host 127.0.0.1" in notes[0] and "50 trajectories" in notes[-1] and len(notes) == 2


@pytest.mark.parametrize(
    ("values_", "said"),
    [
        ({"endpoint": "localhost:4318"}, "use a URL such as http://localhost:4318"),
        ({"headers": 3}, "headers are 3"),
        ({"texts": "yes"}, "texts is 'yes'"),
    ],
)
def test_bad_settings_are_refused_in_one_line(values_: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        Telemetry(**values_)  # type: ignore[arg-type]
    assert heddle_dask.Telemetry is Telemetry


def test_the_option_is_checked_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(heddle, ["rollout", "--otel", "nowhere", "--engine", "emulated"])
    assert result.exit_code == 2 and "endpoint is 'nowhere'" in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_without_opentelemetry_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(BadInput, match="pip install opentelemetry-sdk"):
        Telemetry(endpoint="http://localhost:4318")


@pytest.mark.cluster
def test_spans_report_and_trace_of_a_live_run(model_dir: str, tmp_path: Path) -> None:
    """One rollout, seen three ways: every trajectory's spans arrive, and all its seconds are accounted for."""
    out = tmp_path / "run.zarr"
    notes: list[str] = []

    async def body(endpoint: str) -> None:
        async with (
            shared_cluster() as client,
            Rollout(
                client, env=ToolAgent(), model=model_dir, engines=emulated(model_dir), strategy="heddle", samples=2,
                seed=5, out=Output(out, telemetry=Telemetry(endpoint=endpoint)), progress=notes.append,
            ) as rollout,
        ):  # fmt: skip
            batch = await rollout.run(6)
            assert "12 trajectories" in batch._repr_html_() and "12 completed" in batch._repr_html_()
            assert "strategy" in rollout._repr_html_()

    with OtlpReceiver() as receiver:
        run(body(receiver.endpoint))
    roots = [span for span in receiver.spans if not span.parent_span_id]
    assert len(roots) == 12 and not [note for note in notes if "spans" in note]
    html, trace = tmp_path / "report.html", tmp_path / "run.pftrace"
    result = CliRunner().invoke(heddle, ["show", str(out), "--html", str(html), "--perfetto", str(trace), "--json"])
    assert result.exit_code == 0, result.output
    seconds = json.loads(result.stdout.splitlines()[-1])["seconds"]
    assert seconds["admission_unknown"] == seconds["waits_unknown"] == 0
    parts = {name: value for name, value in seconds.items() if name.endswith("_s") and name != "total_s"}
    assert sum(parts.values()) == pytest.approx(seconds["total_s"], abs=1e-4)
    assert seconds["decode_s"] > 0 and seconds["tool_s"] > 0 and seconds["generation_s"] == 0
    # A step's span and its record are the same time; the report has no more decoding than steps took.
    spent = sum(s.end_time_unix_nano - s.start_time_unix_nano for s in receiver.spans if s.name.startswith("chat"))
    assert seconds["llm_queue_s"] + seconds["prefill_s"] + seconds["decode_s"] <= spent / 1e9 + 0.01
    page = html.read_text(encoding="utf-8")
    assert page.count('"completed"') >= 12 and "Timeline of trajectories" in page
