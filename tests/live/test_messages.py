"""Every message through Dask's own serialization, and each operation once."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from distributed.protocol import dumps, loads

from heddle_dask.chat.conversation import CalledTool, ChatMessage
from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import (
    FIRST_RUN,
    ActionId,
    EngineId,
    GroupId,
    HostId,
    PolicyVersion,
    StepId,
    TrajectoryId,
)
from heddle_dask.core.nouns import (
    ActionRequest,
    DurationProfile,
    EngineDescription,
    FinishedWork,
    HostDescription,
    StepRequest,
    TpDegreePlan,
    TrajectorySpec,
)
from heddle_dask.core.resources import Amounts, ModelService, PoolMaximum, ResourceDemand, Resources
from heddle_dask.core.run_description import RetryPolicy, StalenessBound, WeightUpdatePolicy
from heddle_dask.core.sampling import StructuredOutput
from heddle_dask.engines.contract import GenerateResult, VersionSpan
from heddle_dask.gateway.orders import Choice, StepAnswer, StepOrder
from heddle_dask.live.wire import cluster_messages as cluster
from heddle_dask.live.wire import driver_messages as driver
from heddle_dask.live.wire import envelopes, results, transport
from heddle_dask.live.wire import gateway_messages as gateway
from heddle_dask.live.wire import training_messages as training
from heddle_dask.live.wire import worker_messages as workers
from heddle_dask.live.wire.codec import OP, Message, Request, WireValue
from heddle_dask.live.wire.envelopes import UNSTAMPED
from heddle_dask.live.wire.known_orders import KnownOrders
from heddle_dask.live.wire.messages import (
    ActionOutcome,
    ActionPlacement,
    StepPlacement,
    StepResult,
    action_key,
    named_by,
    step_key,
)

VERSION = PolicyVersion("a1", 7)
STEP = StepId(TrajectoryId("t/0"), 3, 1)
ACTION = ActionId("t/0/a2")
SPEC = TrajectorySpec(TrajectoryId("t/0"), GroupId("g"), 1, "d", 40, 30, 9, 2)
ENGINE = EngineDescription(EngineId("e"), 8, 4096, 2, 10_000, 3, True, 0.5, cost='{"fixed_s": 0.006}')
RESULT = StepResult(
    "ok",
    engine_id="e",
    generated=GenerateResult((1,), (-0.5,), "stop", 4, 7, 0.1, 0.2, 0.3, (VersionSpan(7, 0, 1),)).packed(),
    engine_s=0.6,
    read='{"content": "4"}',
)
OUTCOME = ActionOutcome("raised", b"value", "message", "detail", "h", 2, 0.5, 0.25, 0.125, "output")
LINE = [["StepCancelled", 0.5, ["t/0", 3, 1]], []]
REQUEST = ActionRequest(
    ACTION,
    SPEC.trajectory_id,
    "tool",
    "name",
    ResourceDemand.of(cpus=Amounts(1, 8), memory_bytes=2**30),
    profile=DurationProfile(2.0, 0.5),
)
NOTICES = (
    cmd.AdmitTrajectory(SPEC.trajectory_id, EngineId("e")),
    cmd.GiveUpStep(STEP, "cause"),
    cmd.GiveUpAction(ACTION, "cause"),
    driver.StepResultLostNotice(STEP),
    driver.ActionResultLostNotice(ACTION),
    driver.ActionPayloadWantedNotice(ACTION, "tcp://w"),
    ev.EngineLost(UNSTAMPED, EngineId("e"), "reason", stranded=False),
    driver.ApiNotice("search", "open", 30.0, "5 calls failed"),
    driver.ProgressNotice("worker rollout-0 answers again"),
    cmd.CancelTrajectory(SPEC.trajectory_id, "stale"),
    ev.WeightsFetched(UNSTAMPED, EngineId("e"), VERSION, "cause"),
    ev.WeightsInstalled(UNSTAMPED, EngineId("e"), VERSION, 0.05),
)
ORDERED: tuple[envelopes.Ordered, ...] = (
    cmd.AbortStep(STEP, EngineId("e"), "reason"),
    cmd.AbortAction(ACTION, HostId("h")),
    cmd.DropContext(SPEC.trajectory_id, EngineId("e")),
    cmd.CloseSandbox(HostId("h"), "s/t/s0"),
    cmd.EvictService(HostId("h"), "rm", 2, 2),
    cmd.DropServiceCopy(HostId("h"), "rm", 2),
    cmd.FetchWeights(EngineId("e"), VERSION, "file:///w/manifest.json"),
    cmd.InstallWeights(EngineId("e"), VERSION, True),
)
REPORTED: tuple[envelopes.Reported, ...] = (
    ev.StepStarted(UNSTAMPED, STEP, EngineId("e")),
    ev.ActionFinished(UNSTAMPED, ACTION, HostId("h"), 0.5, False, False, "memory", 2.5),
    ev.MoveEnded(UNSTAMPED, SPEC.trajectory_id, EngineId("f"), True, "transfer", 0.5, 9, "cause", EngineId("e")),
    ev.EngineLost(UNSTAMPED, EngineId("e"), "reason", stranded=False),
    ev.HostLost(UNSTAMPED, HostId("h")),
    ev.ServiceLoaded(UNSTAMPED, HostId("h"), "rm", 2, 2, False, 1.5, "cause"),
    ev.ServiceEvicted(UNSTAMPED, HostId("h"), "rm", 2, 2),
    ev.ServiceLost(UNSTAMPED, HostId("h"), "rm", 2, 2, "cause"),
    ev.WeightsFetched(UNSTAMPED, EngineId("e"), VERSION, "cause", 1.5),
    ev.WeightsInstalled(UNSTAMPED, EngineId("e"), VERSION, 0.05, "cause"),
    ev.TrajectoryForked(UNSTAMPED, SPEC, TrajectoryId("t/0#1")),
    ev.StepCancelled(UNSTAMPED, STEP),
    ev.ActionCancelled(UNSTAMPED, ACTION),
    ev.SandboxClosed(UNSTAMPED, "s/t/s0"),
    ev.ProgramEnded(UNSTAMPED, SPEC.trajectory_id),
    ev.OptimizerStepEnded(UNSTAMPED, FIRST_RUN, VERSION),
    ev.WeightsPublished(UNSTAMPED, VERSION, "file:///w/manifest.json", 9),
    ev.SwitchRequested(UNSTAMPED, VERSION),
    ev.GroupEnded(UNSTAMPED, FIRST_RUN, SPEC.group_id, 4),
    ev.TrajectoryRedundant(UNSTAMPED, SPEC.trajectory_id),
)
SAMPLES: list[Message] = [
    transport.Done(),
    transport.Refusal("reason"),
    transport.FaultReport("s", "what it was: ValueError (file.py:1)"),
    *(each for each in NOTICES if isinstance(each, Message)),
    *(envelopes.Order("s", command) for command in ORDERED),
    *(envelopes.Report("s", event) for event in REPORTED),
    driver.StartSession("s", "client", "heddle", ("a=b",), 3, {"1": {"x": 1.5}}, RetryPolicy(max_losses=1)),
    driver.StartSession(
        "s",
        "client",
        "heddle",
        (),
        3,
        services=(driver.DeclaredService(ModelService("rm", (1, 2), batch=4), {"name": "rm", "batch": 4}),),
    ),
    driver.StartSession(
        "s",
        "client",
        "heddle",
        (),
        3,
        staleness=StalenessBound(2, "pace", 64),
        weights=WeightUpdatePolicy("all-at-once", True),
        name="math-seed0",
        environment="math",
    ),
    driver.Updates(NOTICES, [LINE], {"finished": 2}, "Traceback", "restarted", lines_before=7),
    driver.FetchUpdates("s", 0.25),
    driver.EndSession("s"),
    driver.SubmitTrajectories("s", (driver.SubmittedTrajectory(SPEC, 9, 1.5, 2),)),
    driver.TrajectoriesEndedReport(
        "s",
        (
            driver.EndedTrajectory(ev.TrajectoryEnded(UNSTAMPED, SPEC.trajectory_id, "completed"), "cause"),
            driver.EndedTrajectory(
                ev.TrajectoryEnded(UNSTAMPED, SPEC.trajectory_id, "failed"), "agent", 0.5, "KeyError: 3"
            ),
        ),
    ),
    driver.Capacity((driver.ReadyEngine(ENGINE, "vllm", "dir"),), 4, {"tcp://w": "no GPU"}, ("p",), 3, 2, 1),
    driver.GetCapacity(),
    cluster.CurrentSnapshot({"journal_offset": 3, "engines": [{"index": 0}]}),
    cluster.GetSnapshot(),
    cluster.GetSnapshot("eval"),
    driver.OwnEngines("s", 60.0),
    driver.AwaitEnginesEnd(),
    driver.DeployedEngines(("a", "b"), (2, 1)),
    driver.GetDeployedEngines(),
    driver.ClearEngines(),
    driver.EnginesProvided(TpDegreePlan((2, 1), "known", 3.5, 0.5, ((1, 4.5), (2, None))), 1),
    driver.ProvideEngines(
        session="s",
        asked=(2, 1),
        specs=(driver.EngineSpecAt(2, {"kind": "vllm"}),),
        costs=(driver.EngineCostAt(2, 8, {"fixed_s": 0.5}),),
        seed=3,
        lengths_known=True,
        default=1,
        max_context_tokens=4096,
        trajectories=(driver.BatchTrajectory(SPEC, 12),),
        finished=(FinishedWork(10, 5, 0.5),),
    ),
    cluster.ExchangeDemand(
        cluster.QueuedCapacity(2, 1, 1, 0, 3, "gpu-0: it was cancelled", 96.0),
        60.0,
        (PoolMaximum("cpu", Resources.of(cpus=4)),),
    ),
    cluster.Demand(
        True, 9, 1.5, 0.5, 7, 1, 2, 16, 1, 3, 4.5, 1, 8, (cluster.WorkerLoad("gpu-0", True, 1, 2, 3, 4, "x"),)
    ),
    workers.EngineWorkerReport("w", "node", 1, ("0", "GPU-a")),
    workers.EngineStartingReport("compiling"),
    workers.EngineWorkerReport("w", "node", 1, ("0",), {"kind": "vllm"}),
    workers.GpusReturnedReport(),
    workers.GpusReturnedReport("trainer"),
    workers.TakeGpus("tcp://h:1", "w", "node", ("0", "GPU-a"), 2, "services"),
    workers.GpusTaken(("0", "GPU-a")),
    workers.EngineReadyReport(ENGINE, "vllm", "dir", 1.5),
    workers.EngineStartFailedReport("reason"),
    workers.SilenceReport("service rm-0-1 has not answered for 10 s"),
    workers.HostReadyReport(HostDescription(HostId("h"), Resources.of(cpus=4))),
    cluster.DrainWorkers(("gpu-0-0", "gpu-0-1"), 30.0),
    cluster.DrainedWorkers(("gpu-0-0",), ("gpu-0-1",)),
    workers.ActionPayloadWantedReport("s", ACTION),
    workers.PutActionPayload("s", ACTION, b"payload"),
    workers.HostEngine({"kind": "vllm", "options": {"a": [1, 2]}}),
    workers.HostEngine(None),
    workers.MoveContextOrder(
        "s", cmd.MoveContext(SPEC.trajectory_id, EngineId("e"), EngineId("f"), "recompute"), "tcp://w"
    ),
    workers.LoadServiceOrder("s", cmd.LoadService(HostId("h"), "rm", 2, 2, True, False), {"name": "rm", "batch": 4}),
    workers.ClearServicesOrder(),
    workers.ContextTokens(b"\x01\x00\x00\x00"),
    workers.ContextTokens(None),
    workers.TakeContext("s", SPEC.trajectory_id),
    workers.ExportedContext(b"\x01\x00\x00\x00", {"tokens": 1}, ""),
    workers.ExportedContext(cause="gone"),
    workers.ExportContext("s", SPEC.trajectory_id, True),
    training.TrainingFiguresReport("s", 3, {"reward": 0.5, "seconds/train": 1.25}),
    training.GetWeightStatus("s"),
    training.WeightStatus(
        (training.EngineWeightState(EngineId("e"), VERSION, None, "idle"),), VERSION, None, True, 8, 4, 4, 7
    ),
    driver.SubmitTasks(
        "s",
        (
            driver.SubmittedTask(step_key("s", STEP), StepRequest(STEP, 40, 20), b"run"),
            driver.SubmittedTask(action_key("s", ACTION), REQUEST, b"run"),
        ),
    ),
    results.ResultReport(
        "s", step_key("s", STEP), ev.StepFinished(UNSTAMPED, STEP, EngineId("e"), 5, 4, "stop", 7), b"result"
    ),
    results.ResultReport("s", step_key("s", STEP), ev.StepFailed(UNSTAMPED, STEP, EngineId("e"), "engine-lost"), b""),
    results.ResultReport(
        "s",
        action_key("s", ACTION),
        ev.ActionFinished(UNSTAMPED, ACTION, HostId("h"), 0.5, False, False, "memory", 2.5),
        b"result",
    ),
    results.ResultNotice("s", action_key("s", ACTION), b"result"),
    gateway.GatewayOrder("s", "h/g1", 3, "hd-s-x", b"body"),
    gateway.GatewayOrderNotice("s", "tcp://w", "h/g1", 3, "hd-s-x", b"body"),
    gateway.GatewayCancelled("s", "h/g1", (3, 4), "cause"),
    gateway.GatewayCancelledNotice("s", "tcp://w", "h/g1", (3, 4), "cause"),
    gateway.GatewayAnswer("s", "tcp://w", "h/g1", 3, b"body"),
    gateway.GatewaySessionEnded("s", "reason"),
    gateway.GatewayPlace("/tmp/x", 8911, "node", "https://10.0.0.1:8912"),
    gateway.OpenGateway("s"),
    gateway.StartGateway(),
    gateway.TakeText((gateway.StepText("h/g1", 3, 1, 12, "text"),)),
    gateway.TextTaken(),
]
# Dask takes these out of a message, or adds them, before a handler is called.
DASK_NAMES = {OP, "worker", "client", "comm", "reply", "close", "serializers", "deserializers"}


def message_types() -> Iterator[type[Message]]:
    for module in (transport, envelopes, cluster, driver, workers, training, results, gateway):
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__ and issubclass(kind, Message) and is_dataclass(kind):
                yield kind


def operation_of(message: Message) -> str:
    match message:
        case envelopes.Order():
            return message.operation(type(message.command))
        case envelopes.Report():
            return message.operation(type(message.event))
    return message.op


def through_dask(mapping: dict[str, Any]) -> dict[str, Any]:
    received: dict[str, Any] = loads(dumps(mapping))
    return received


def listed(value: Any) -> Any:
    """The value with tuples as lists: Dask reads every list as a tuple."""
    if isinstance(value, dict):
        return {name: listed(item) for name, item in value.items()}
    return [listed(item) for item in value] if isinstance(value, list | tuple) else value


def no_record_is_positional(value: Any, plain: bool) -> bool:
    """Whether `plain`, the wire form of `value`, has names wherever `value` has fields."""
    if is_dataclass(value) or isinstance(value, StepId):
        return isinstance(plain, dict) and all(
            no_record_is_positional(getattr(value, name), item) for name, item in plain.items() if name != OP
        )
    if isinstance(value, tuple):
        return all(no_record_is_positional(*pair) for pair in zip(value, plain, strict=True))  # type: ignore[arg-type]
    return True


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was_and_without_a_pickle(message: Message) -> None:
    wire = message.to_wire()
    assert wire[OP] == operation_of(message)
    frames = dumps(wire)
    assert len(frames) == 1, "all of it is in the msgpack frame"
    received = type(message).from_wire(through_dask(wire))
    assert listed(received.to_wire()) == listed(wire)
    if not isinstance(
        message, driver.Updates | workers.HostEngine | cluster.CurrentSnapshot
    ):  # they hold lists of any form
        assert received == message
    assert no_record_is_positional(message, wire)


def test_every_message_has_a_sample_and_every_operation_is_there_once() -> None:
    kinds = list(message_types())
    assert {type(message) for message in SAMPLES} == set(kinds)
    ops = [kind.op for kind in kinds if not issubclass(kind, envelopes.Envelope)]
    ops += [*envelopes.Order.kinds, *envelopes.Report.kinds]
    assert len(set(ops)) == len(ops)
    assert {type(command) for command in ORDERED} == set(get_args(envelopes.Ordered))
    assert {type(event) for event in REPORTED} == set(get_args(envelopes.Reported))
    for kind in kinds:
        assert kind.op.startswith("heddle")
        assert not {field.name for field in fields(kind)} & DASK_NAMES  # type: ignore[arg-type]
    answers = {kind.answer for kind in kinds if issubclass(kind, Request)}
    assert answers <= set(kinds)
    assert set(get_args(driver.Notice)) == {type(notice) for notice in NOTICES}


def test_an_order_of_an_agent_is_sent_without_what_the_driver_has() -> None:
    call = CalledTool("f", '{"a": 1}', "c1")
    first = StepOrder(
        (ChatMessage("system", "be short"), ChatMessage("user", "hello")),
        tools='[{"type": "function"}]',
        stop=("end",),
        structured=StructuredOutput(choice=("a", "b")),
    )
    answered = ChatMessage("assistant", "", "hm", (call,))
    second = replace(first, messages=(*first.messages, answered, ChatMessage("tool", "2", call_id="c1")))
    other = replace(second, messages=(second.messages[0], ChatMessage("user", "bye")), tools="")
    gateway_end, driver_end = KnownOrders(), KnownOrders()
    for number, (order, sent) in enumerate(((first, 2), (second, 2), (second, 0), (other, 1)), start=1):
        body = gateway_end.shortened(order, counts=False)
        assert len(body.order.messages) == sent
        received = gateway.body_from(gateway.OrderBody, gateway.packed_body(body))
        assert received == body
        assert driver_end.whole(received) == order
        for end in (gateway_end, driver_end):
            end.add(number, order)
    kept = [known.messages for known in gateway_end._orders.values()]
    assert len({id(message) for messages in kept for message in messages}) == 5, "each message is kept once"
    assert KnownOrders().whole(gateway_end.shortened(second, counts=False)) is None, "a driver that knows nothing"


def test_a_key_names_its_session() -> None:
    key = gateway.new_key("ab12")
    assert gateway.session_of_key(key) == "ab12" and key != gateway.new_key("ab12")
    assert [gateway.session_of_key(each) for each in ("", "sk-x", "hd-ab12", "hd--x")] == ["", "", "", ""]
    message = ChatMessage("assistant", "yes", calls=(CalledTool("f", "{}", "c"),))
    answer = StepAnswer((Choice(message, "tool_calls", "yes", (1, 2), (-0.5, 0.0)),), 9, 2, 4, 7)
    body = gateway.AnswerBody(answer, 3)
    assert gateway.body_from(gateway.AnswerBody, gateway.packed_body(body)) == body


@pytest.mark.parametrize(
    "value",
    [
        RESULT,
        OUTCOME,
        StepPlacement(EngineId("e"), 2.5, "tcp://w"),
        ActionPlacement(HostId("h"), Resources.of(cpus=2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_as_it_was(value: WireValue) -> None:
    assert type(value).from_wire(through_dask(value.to_wire())) == value


@pytest.mark.parametrize("result", [RESULT, OUTCOME], ids=lambda value: type(value).__name__)
def test_a_result_comes_back_as_it_was(result: results.Result) -> None:
    assert pickle.loads(results.packed_result(result)) == result


def test_a_message_of_another_version_is_refused() -> None:
    wire = driver.FetchUpdates("s", 0.5).to_wire()
    with pytest.raises(TypeError):
        driver.FetchUpdates.from_wire({**wire, "unknown": 1})
    with pytest.raises(TypeError):
        driver.FetchUpdates.from_wire({"session": "s"})
    order = envelopes.Order("s", cmd.CloseSandbox(HostId("h"), "s/t/s0")).to_wire()
    wrongs: list[dict[str, Any]] = [
        {"colour": "red"},
        {"command": {"host_id": "h"}},
        {"command": {**order["command"], "x": 1}},
    ]
    for wrong in wrongs:
        with pytest.raises(TypeError):
            envelopes.Order.from_wire({**order, **wrong})
    with pytest.raises(KeyError):
        envelopes.Order.from_wire({**order, OP: "heddle-Order-RunStarted"})
    retries = {"max_losses": -1, "max_preemptions": 2, "max_step_attempts": 32, "max_action_attempts": 4}
    start = driver.StartSession("s", "c", "heddle", (), 0).to_wire()
    with pytest.raises(BadInput, match="max_losses is -1"):
        driver.StartSession.from_wire({**start, "retries": retries})


def test_a_key_names_its_step_or_action() -> None:
    assert named_by(step_key("s", STEP)) == STEP
    assert named_by(action_key("s", ACTION)) == ACTION


def test_a_message_that_cannot_be_handled_is_told_and_goes_no_further() -> None:
    told: list[tuple[str, str]] = []
    handlers = transport.Handlers(lambda *failure: told.append(failure))

    def fails(*message: Any) -> None:
        raise ValueError("first\nsecond")

    handlers.take(workers.ClearServicesOrder, fails)
    handlers.take_order(cmd.CloseSandbox, fails)
    server: Any = SimpleNamespace(handlers={}, stream_handlers={})
    handlers.add_to(server)
    order = envelopes.Order("s", cmd.CloseSandbox(HostId("h"), "s/t/s0")).to_wire()
    message = workers.ClearServicesOrder().to_wire()
    cases: list[tuple[dict[str, Any], list[str]]] = [
        (message, ["", f"{message[OP]} failed: ValueError: first second (test_messages.py:"]),
        (order, ["s", f"{order[OP]} failed: ValueError: first second (test_messages.py:"]),
        ({**order, "colour": "red"}, ["s", f"{order[OP]} failed: TypeError: "]),
        ({**message, "colour": "red"}, []),  # of another version, and no session waits for it
    ]
    for mapping, failure in cases:
        mapping = dict(mapping)
        told.clear()
        server.stream_handlers[mapping.pop(OP)](**mapping)
        assert [text for each in told for text in each][:1] == failure[:1]
        assert all(line.startswith(failure[1]) and "\n" not in line for _, line in told)
