"""Every message through Dask's own serialization, and each operation once."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_args

import pytest
from distributed.protocol import dumps, loads

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import ActionId, EngineId, GroupId, HostId, PolicyVersion, StepId, TrajectoryId
from heddle_dask.core.nouns import (
    ActionRequest,
    EngineDescription,
    FinishedWork,
    HostDescription,
    StepRequest,
    TpDegreePlan,
    TrajectorySpec,
)
from heddle_dask.core.resources import ModelService, PoolMaximum, Resources
from heddle_dask.core.run_description import RetryPolicy, StalenessBound, WeightUpdatePolicy
from heddle_dask.engines.contract import VersionSpan
from heddle_dask.live.wire import cluster_messages as cluster
from heddle_dask.live.wire import drain_messages as drains
from heddle_dask.live.wire import driver_messages as driver
from heddle_dask.live.wire import service_messages as services
from heddle_dask.live.wire import training_messages as training
from heddle_dask.live.wire import transport
from heddle_dask.live.wire import watch_messages as watching
from heddle_dask.live.wire import weight_messages as weights
from heddle_dask.live.wire import worker_messages as workers
from heddle_dask.live.wire.codec import OP, Message, Request, WireValue
from heddle_dask.live.wire.messages import (
    ActionOutcome,
    ActionPlacement,
    StepEnd,
    StepPlacement,
    StepResult,
    Submission,
    action_key,
    named_by,
    step_key,
)

VERSION = PolicyVersion("a1", 7)
STEP = StepId(TrajectoryId("t/0"), 3, 1)
ACTION = ActionId("t/0/a2")
END = StepEnd(STEP, EngineId("e"), 5, 4, "stop", 7)
SPEC = TrajectorySpec(TrajectoryId("t/0"), GroupId("g"), 1, "d", 40, 30, 9, 2)
ENGINE = EngineDescription(EngineId("e"), 8, 4096, 2, 10_000, 3, True, 0.5)
RESULT = StepResult(
    "ok",
    engine_id="e",
    token_ids=b"\x01\x00\x00\x00",
    logprobs=b"\x00\x00\x00\x00",
    finish_reason="stop",
    version_spans=(VersionSpan(7, 0, 1),),
    queue_s=0.1,
    prefill_s=0.2,
    decode_s=0.3,
    engine_s=0.6,
)
OUTCOME = ActionOutcome(
    "raised", b"value", "message", "detail", "h", 2, 0.5, "tcp://w", 0.25, 0.125, "output"
)
LINE = [["StepCancelled", 0.5, ["t/0", 3, 1]], []]
NOTICES = (
    driver.AdmittedNotice(SPEC.trajectory_id),
    driver.StepGivenUpNotice(STEP, "cause"),
    driver.ActionGivenUpNotice(ACTION, "cause"),
    driver.StepResultLostNotice(STEP),
    driver.ActionResultLostNotice(ACTION),
    driver.ActionPayloadWantedNotice(ACTION, "tcp://w"),
    driver.EngineLostNotice(EngineId("e"), "reason"),
    driver.ApiNotice("search", "open", 30.0, "5 calls failed"),
    training.TrajectoryCancelledNotice(SPEC.trajectory_id, "stale"),
    training.EngineUpdatedNotice(EngineId("e"), VERSION, 0.05, "cause"),
)
SAMPLES: list[Message] = [
    transport.Done(),
    transport.Refusal("reason"),
    *NOTICES,
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
    ),
    driver.Updates(NOTICES, [LINE], {"finished": 2}, "Traceback", "restarted"),
    driver.FetchUpdates("s", 0.25),
    driver.EndSession("s"),
    driver.SubmitTrajectories("s", (driver.SubmittedTrajectory(SPEC, 9, 1.5, 2),)),
    driver.ProgramEndedReport("s", SPEC.trajectory_id, END),
    driver.TrajectoriesEndedReport(
        "s",
        (
            driver.EndedTrajectory(SPEC.trajectory_id, "completed", END),
            driver.EndedTrajectory(SPEC.trajectory_id, "failed", cause="agent"),
        ),
    ),
    driver.TrajectoryForkedReport("s", SPEC, TrajectoryId("t/0#1")),
    driver.SandboxClosedReport("s", "s/t/s0"),
    driver.StepCancelledReport("s", STEP),
    driver.TrajectoryForkedReport("s", SPEC, TrajectoryId("t")),
    driver.Capacity((driver.ReadyEngine(ENGINE, "vllm", "dir"),), 4, {"tcp://w": "no GPU"}, ("p",), 3, 2, 1),
    driver.GetCapacity(),
    watching.CurrentSnapshot({"journal_offset": 3, "engines": [{"index": 0}]}),
    watching.GetSnapshot(),
    driver.OwnEngines("s", 60.0),
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
        cluster.QueuedCapacity(2, 1, 1, 0, 3, "gpu-0: it was cancelled"),
        60.0,
        (PoolMaximum("cpu", Resources.of(cpus=4)),),
    ),
    cluster.Demand(
        True, 9, 1.5, 0.5, 7, 1, 2, 16, 3, 4.5, 1, 8, (cluster.WorkerLoad("gpu-0", True, 1, 2, 3, 4, "x"),)
    ),
    workers.EngineWorkerReport("w", "node", 1, ("0", "GPU-a")),
    workers.EngineWorkerReport("w", "node", 1, ("0",), {"kind": "vllm"}),
    workers.GpusReturnedReport(),
    workers.EngineReadyReport(ENGINE, "vllm", "dir", 1.5),
    workers.EngineLostReport(EngineId("e"), "reason"),
    workers.EngineStartFailedReport("reason"),
    workers.HostReadyReport(HostDescription(HostId("h"), Resources.of(cpus=4))),
    workers.HostLostReport(HostId("h")),
    drains.DrainWorkers(("gpu-0-0", "gpu-0-1"), 30.0),
    drains.DrainedWorkers(("gpu-0-0",), ("gpu-0-1",)),
    workers.ActionPayloadWantedReport("s", ACTION),
    workers.PutActionPayload("s", ACTION, b"payload"),
    workers.StepStartedReport("s", STEP, EngineId("e")),
    workers.StepEndedReport("s", END),
    workers.StepFailedReport("s", STEP, EngineId("e"), "engine-lost"),
    workers.ActionEndedReport("s", ACTION, HostId("h"), 0.5, False, False, "memory", 2.5),
    workers.MoveEndedReport(
        "s", SPEC.trajectory_id, EngineId("e"), EngineId("f"), True, "transfer", 0.5, 9, "cause"
    ),
    workers.HostEngine({"kind": "vllm", "options": {"a": [1, 2]}}),
    workers.HostEngine(None),
    workers.AbortStepOrder("s", STEP),
    workers.AbortActionOrder("s", ACTION),
    workers.CloseSandboxOrder("s", "s/t/s0"),
    workers.MoveContextOrder("s", SPEC.trajectory_id, "tcp://w", EngineId("e"), EngineId("f"), "recompute"),
    workers.DropContextOrder("s", SPEC.trajectory_id),
    workers.ContextTokens(b"\x01\x00\x00\x00"),
    workers.ContextTokens(None),
    workers.TakeContext("s", SPEC.trajectory_id),
    workers.ExportedContext(b"\x01\x00\x00\x00", {"tokens": 1}, ""),
    workers.ExportedContext(cause="gone"),
    workers.ExportContext("s", SPEC.trajectory_id, True),
    services.LoadServiceOrder("s", {"name": "rm", "batch": 4}, 2, 2, True, False),
    services.EvictServiceOrder("s", "rm", 2, 2),
    services.DropServiceCopyOrder("s", "rm", 2),
    services.ClearServicesOrder(),
    services.ServiceLoadedReport("s", HostId("h"), "rm", 2, 2, False, 1.5, "cause"),
    services.ServiceEvictedReport("s", HostId("h"), "rm", 2, 2),
    services.ServiceLostReport("s", HostId("h"), "rm", 2, 2, "cause"),
    weights.FetchWeightsOrder(EngineId("e"), VERSION, "file:///w/manifest.json"),
    weights.InstallWeightsOrder(EngineId("e"), VERSION, True),
    weights.WeightsFetchedReport(EngineId("e"), VERSION, "cause", 1.5),
    weights.WeightsInstalledReport(EngineId("e"), VERSION, 0.05, "cause"),
    training.OptimizerStepReport("s", VERSION),
    training.TrainingFiguresReport("s", 3, {"reward": 0.5, "seconds/train": 1.25}),
    training.WeightsPublishedReport("s", VERSION, "file:///w/manifest.json", 9),
    training.SwitchReport("s", VERSION),
    training.GroupEndedReport("s", SPEC.group_id, 4),
    training.TrajectoryRedundantReport("s", SPEC.trajectory_id),
    training.GetWeightStatus("s"),
    training.WeightStatus(
        (training.EngineWeightState(EngineId("e"), VERSION, None, "idle"),), VERSION, None, True, 8, 4, 4, 7
    ),
    workers.StepResults((workers.PushedStep(STEP, RESULT),)),
    workers.ActionResults((workers.PushedAction(ACTION, OUTCOME),)),
    workers.FetchStepResults("s"),
    workers.FetchActionResults("s"),
]
# Dask takes these out of a message, or adds them, before a handler is called.
DASK_NAMES = {OP, "worker", "client", "comm", "reply", "close", "serializers", "deserializers"}


def message_types() -> Iterator[type[Message]]:
    for module in (transport, cluster, driver, drains, services, workers, watching, weights, training):
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__ and issubclass(kind, Message):
                yield kind


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
    assert wire[OP] == message.op
    frames = dumps(wire)
    assert len(frames) == 1, "all of it is in the msgpack frame"
    received = type(message).from_wire(through_dask(wire))
    assert listed(received.to_wire()) == listed(wire)
    if not isinstance(
        message, driver.Updates | workers.HostEngine | watching.CurrentSnapshot
    ):  # they hold lists of any form
        assert received == message
    assert no_record_is_positional(message, wire)


def test_every_message_has_a_sample_and_every_operation_is_there_once() -> None:
    kinds = list(message_types())
    assert {type(message) for message in SAMPLES} == set(kinds)
    ops = [kind.op for kind in kinds]
    assert len(set(ops)) == len(ops)
    for kind in kinds:
        assert kind.op.startswith("heddle")
        assert not {field.name for field in fields(kind)} & DASK_NAMES  # type: ignore[arg-type]
    answers = {kind.answer for kind in kinds if issubclass(kind, Request)}
    assert answers <= set(kinds)
    assert set(get_args(driver.Notice)) == {type(notice) for notice in NOTICES}


@pytest.mark.parametrize(
    "value",
    [
        RESULT,
        OUTCOME,
        END,
        StepPlacement(EngineId("e"), 2.5, "tcp://w"),
        ActionPlacement(HostId("h"), Resources.of(cpus=2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_as_it_was(value: WireValue) -> None:
    assert type(value).from_wire(through_dask(value.to_wire())) == value


def test_a_submission_travels_with_its_graph() -> None:
    for submission in (
        Submission(StepRequest(STEP, 40, 20), END),
        Submission(ActionRequest(ACTION, SPEC.trajectory_id, "tool", "name", 1, 4)),
    ):
        assert pickle.loads(pickle.dumps(submission)) == submission


def test_a_message_of_another_version_is_refused() -> None:
    wire = driver.FetchUpdates("s", 0.5).to_wire()
    with pytest.raises(TypeError):
        driver.FetchUpdates.from_wire({**wire, "unknown": 1})
    with pytest.raises(TypeError):
        driver.FetchUpdates.from_wire({"session": "s"})
    retries = {"max_losses": -1, "max_preemptions": 2, "max_step_attempts": 32, "max_action_attempts": 4}
    start = driver.StartSession("s", "c", "heddle", (), 0).to_wire()
    with pytest.raises(BadInput, match="max_losses is -1"):
        driver.StartSession.from_wire({**start, "retries": retries})


def test_a_key_names_its_step_or_action() -> None:
    assert named_by(step_key("s", STEP)) == STEP
    assert named_by(action_key("s", ACTION)) == ACTION
