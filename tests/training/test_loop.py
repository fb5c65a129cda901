"""The training loop as lists of events and commands, and its promises over any order of answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.training.loop import (
    BatchReady,
    EndTraining,
    Evaluate,
    EvaluationEnded,
    FormBatch,
    LoopCommand,
    LoopEvent,
    LoopStart,
    OpenBatches,
    PublishEnded,
    PublishLost,
    PublishVersion,
    StepTrained,
    StopAsked,
    SwitchEnded,
    SwitchVersion,
    TrainingLoop,
    TrainOnBatch,
    WeightsCopied,
)
from heddle_dask.training.plan import TrainingPlan, plan_of_mode


def test_sync_does_one_thing_after_another() -> None:
    loop = TrainingLoop(plan_of_mode("sync", 2))
    assert loop.begin() == [OpenBatches(1), FormBatch(1)]
    assert loop.handle(BatchReady(1)) == [TrainOnBatch(1)]
    assert loop.handle(StepTrained(1)) == [PublishVersion(1)]
    assert loop.handle(PublishEnded(1)) == [SwitchVersion(1)]
    assert loop.handle(SwitchEnded(1)) == [OpenBatches(2), FormBatch(2)]
    assert loop.handle(BatchReady(2)) == [TrainOnBatch(2)]
    assert loop.handle(StepTrained(2)) == [PublishVersion(2)]
    assert loop.handle(PublishEnded(2)) == [SwitchVersion(2)]
    assert loop.handle(SwitchEnded(2)) == [EndTraining(2)]
    assert loop.phase == "done"


def test_one_off_trains_a_batch_while_the_next_runs_and_switches_in_between() -> None:
    loop = TrainingLoop(plan_of_mode("one-off", 3))
    assert loop.begin() == [OpenBatches(1), FormBatch(1)]
    assert loop.handle(BatchReady(1)) == [OpenBatches(2), TrainOnBatch(1)]
    assert loop.handle(StepTrained(1)) == [PublishVersion(1), FormBatch(2)]
    assert loop.handle(PublishEnded(1)) == []  # batch 2 finishes on weights 0
    assert loop.handle(BatchReady(2)) == [SwitchVersion(1), TrainOnBatch(2)]
    assert loop.handle(SwitchEnded(1)) == [OpenBatches(3)]


def test_the_papers_order_gets_a_batch_then_switches_then_trains() -> None:
    loop = TrainingLoop(plan_of_mode("async", 9, alpha=2, switch="after-batch"))
    assert loop.begin() == [OpenBatches(3), FormBatch(1)]
    assert loop.handle(BatchReady(1)) == [TrainOnBatch(1)]
    assert loop.handle(StepTrained(1)) == [PublishVersion(1), FormBatch(2)]
    assert loop.handle(PublishEnded(1)) == []  # waits for the batch, as the paper does
    assert loop.handle(BatchReady(2)) == [SwitchVersion(1), TrainOnBatch(2)]
    # Weights 0 may be in batches up to 3: tasks of batch 4 wait for weights 1.
    assert loop.handle(SwitchEnded(1)) == [OpenBatches(4)]


def test_async_trains_on_while_weights_are_published_and_passes_over_those_between() -> None:
    loop = TrainingLoop(plan_of_mode("async", 9, alpha=3))
    loop.begin()
    loop.handle(BatchReady(1))
    assert loop.handle(StepTrained(1)) == [PublishVersion(1), FormBatch(2)]
    assert loop.handle(BatchReady(2)) == []  # the trainer copies its weights
    assert loop.handle(WeightsCopied(1)) == [TrainOnBatch(2)]
    assert loop.handle(StepTrained(2)) == [FormBatch(3)]
    assert loop.handle(BatchReady(3)) == [TrainOnBatch(3)]
    # Weights 2 are those of the trainer no more: it is on its way to weights 3.
    assert loop.handle(PublishEnded(1)) == [SwitchVersion(1)]
    assert loop.handle(StepTrained(3))[0] == PublishVersion(3)


def test_a_trainer_that_cannot_copy_its_weights_publishes_before_it_trains_on() -> None:
    loop = TrainingLoop(plan_of_mode("async", 9))
    loop.begin()
    loop.handle(BatchReady(1))
    loop.handle(StepTrained(1))
    assert loop.handle(BatchReady(2)) == []
    assert loop.handle(PublishEnded(1)) == [SwitchVersion(1), TrainOnBatch(2)]


def test_weights_that_died_with_a_trainer_are_not_asked_for_again() -> None:
    loop = TrainingLoop(plan_of_mode("async", 9, alpha=2, evaluate_every=1), LoopStart(0, frozenset({0})))
    loop.begin()
    loop.handle(BatchReady(1))
    assert loop.handle(StepTrained(1)) == [PublishVersion(1, evaluated=True), FormBatch(2)]
    loop.handle(WeightsCopied(1))
    assert loop.handle(BatchReady(2)) == [TrainOnBatch(2)]
    assert loop.handle(PublishLost(1)) == []
    assert loop.handle(StepTrained(2)) == [PublishVersion(2, evaluated=True), FormBatch(3)]


def test_async_switches_as_soon_as_weights_are_published() -> None:
    plan = plan_of_mode("async", 9)
    assert (plan.alpha, plan.depth, plan.switch) == (2, 2, "before-batch")
    assert plan_of_mode("async", 9, alpha=1).switch == "before-batch"
    loop = TrainingLoop(plan)
    loop.begin()
    loop.handle(BatchReady(1))
    loop.handle(StepTrained(1))
    assert loop.handle(PublishEnded(1)) == [SwitchVersion(1)]
    assert loop.handle(BatchReady(2)) == [TrainOnBatch(2)]


def test_an_evaluation_keeps_its_weights_on_the_engines_while_training_goes_on() -> None:
    loop = TrainingLoop(plan_of_mode("async", 9, alpha=1, evaluate_every=9))
    assert loop.begin() == [Evaluate(0), OpenBatches(2), FormBatch(1)]
    assert loop.handle(BatchReady(1)) == [TrainOnBatch(1)]
    loop.handle(StepTrained(1))
    loop.handle(PublishEnded(1))
    assert loop.handle(BatchReady(2)) == [TrainOnBatch(2)]
    assert loop.handle(EvaluationEnded(0)) == [SwitchVersion(1)]


def test_a_resumed_training_brings_its_weights_to_the_engines_first() -> None:
    loop = TrainingLoop(plan_of_mode("async", 4, evaluate_every=2), LoopStart(2, frozenset({0})))
    assert loop.begin() == [PublishVersion(2, evaluated=True)]
    assert loop.handle(PublishEnded(2)) == [SwitchVersion(2)]
    assert loop.handle(SwitchEnded(2)) == [Evaluate(2), OpenBatches(4), FormBatch(3)]


@pytest.mark.parametrize("mode", ["sync", "one-off", "async"])
@pytest.mark.parametrize("steps", [1, 2])  # as many as are trained, or fewer
def test_a_finished_training_that_is_resumed_ends(mode: str, steps: int) -> None:
    loop = TrainingLoop(plan_of_mode(mode, steps), LoopStart(2))
    loop.begin()
    loop.handle(PublishEnded(2))
    assert loop.handle(SwitchEnded(2)) == [EndTraining(2)]


def test_the_phase_is_what_the_step_waits_for() -> None:
    loop = TrainingLoop(plan_of_mode("sync", 1))
    phases: list[str] = [loop.phase]
    for event in (None, BatchReady(1), StepTrained(1), PublishEnded(1), SwitchEnded(1)):
        _ = loop.begin() if event is None else loop.handle(event)
        phases.append(loop.phase)
    assert phases == ["starting", "waiting for a batch", "training", "publishing", "switching", "done"]


def test_a_stop_lets_the_step_that_is_being_trained_end() -> None:
    loop = TrainingLoop(plan_of_mode("async", 9))
    loop.begin()
    loop.handle(BatchReady(1))
    assert loop.handle(StopAsked()) == []
    assert loop.handle(StepTrained(1)) == [EndTraining(1, stopped=True)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"mode": "async", "alpha": -1}, "alpha is -1"),
        ({"mode": "async", "alpha": 0}, "use mode sync"),
        ({"mode": "async", "alpha": 1, "depth": 2}, "depth 2 with alpha 1"),
        ({"mode": "sync", "alpha": 2}, "alpha 2 in mode sync"),
        ({"mode": "one-off", "switch": "before-batch"}, "switch before-batch in mode one-off"),
        ({"mode": "async", "depth": 0, "switch": "after-batch"}, "depth 0 with switch=after-batch"),
        ({"mode": "async", "switch": "late"}, "switch is 'late'"),
    ],
)
def test_contradictions_are_refused_in_one_line(words: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        plan_of_mode(steps=3, **words)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


def _plans() -> st.SearchStrategy[TrainingPlan]:
    modes = st.sampled_from(["sync", "one-off", "async"])
    return st.builds(
        lambda mode, steps, alpha, depth, before, every: plan_of_mode(
            mode,
            steps,
            alpha=alpha if mode == "async" else None,
            depth=min(depth, alpha) if mode == "async" else None,
            switch=("before-batch" if before or not depth else "after-batch") if mode == "async" else None,
            evaluate_every=every,
        ),
        modes,
        st.integers(1, 6),
        st.integers(1, 4),
        st.integers(0, 4),
        st.booleans(),
        st.integers(0, 3),
    )


def _answer(command: LoopCommand, copies: bool) -> LoopEvent | None:
    match command:
        case FormBatch(step):
            return BatchReady(step)
        case TrainOnBatch(step):
            return StepTrained(step)
        case PublishVersion(number):
            return WeightsCopied(number) if copies else PublishEnded(number)
        case SwitchVersion(number):
            return SwitchEnded(number)
        case Evaluate(number):
            return EvaluationEnded(number)
    return None


@given(_plans(), st.integers(0, 3), st.booleans(), st.booleans(), st.data())
def test_in_any_order_of_answers_every_step_is_done_once_and_the_plan_is_kept(
    plan: TrainingPlan, before: int, copies: bool, dies: bool, data: st.DataObject
) -> None:
    start = min(before, plan.steps)
    loop = TrainingLoop(plan, LoopStart(start))
    open_answers: list[LoopEvent] = []
    log: list[LoopCommand] = []
    lost: set[int] = set()
    commands = loop.begin()
    while True:
        for command in commands:
            log.append(command)
            _check(loop, command, open_answers)
            if (answer := _answer(command, copies)) is not None:
                open_answers.append(answer)
        if loop.is_ended:
            break
        assert open_answers, f"nobody will answer: {loop.phase}"
        _check_trainer_is_busy(loop, open_answers)
        event = open_answers.pop(data.draw(st.integers(0, len(open_answers) - 1)))
        if isinstance(event, WeightsCopied):
            open_answers.append(PublishEnded(event.number))
        if isinstance(event, PublishEnded) and dies and StepTrained(event.number + 1) in open_answers:
            event = PublishLost(event.number)
            lost.add(event.number)
        commands = loop.handle(event)
    steps = range(start + 1, plan.steps + 1)
    assert [c.step for c in log if isinstance(c, TrainOnBatch)] == list(steps)
    assert [c.step for c in log if isinstance(c, FormBatch)] == list(steps)
    for kind in (SwitchVersion, PublishVersion):
        numbers = [c.number for c in log if isinstance(c, kind)]
        assert numbers == sorted(set(numbers))
        assert numbers[-1:] == [plan.steps]
    evaluated = [c.number for c in log if isinstance(c, Evaluate)]
    assert evaluated == [k for k in range(start, plan.steps + 1) if plan.evaluates(k) and k not in lost]
    assert {c.number for c in log if isinstance(c, PublishVersion) and c.evaluated} >= {*evaluated} - {0}


def _check_trainer_is_busy(loop: TrainingLoop, open_answers: list[LoopEvent]) -> None:
    """Without barriers a batch waits for a copy of weights, and for no publication but of weights to be evaluated."""
    if loop.plan.barrier or loop.formed == loop.trained or StepTrained(loop.formed) in open_answers:
        return
    is_copied = not {WeightsCopied(loop.trained), PublishEnded(loop.trained)} & {*open_answers}
    assert not is_copied or loop.plan.evaluates(loop.trained)


def _check(loop: TrainingLoop, command: LoopCommand, open_answers: list[LoopEvent]) -> None:
    plan = loop.plan
    match command:
        case OpenBatches(through):
            assert through <= loop.trained + 1 + plan.depth
            # Trained when n = through - 1: what is sampled from now on is not too old for any open batch.
            assert through - 1 - loop.installed <= plan.alpha
            assert loop.installed >= loop.first
            if plan.barrier:  # the batch before has ended, and the weights are fresh enough
                assert loop.formed == through - 1
                assert loop.installed >= plan.needed_version(through)
        case TrainOnBatch(step):
            assert step == loop.trained + 1
            if plan.barrier:
                assert loop.published == loop.switched == loop.trained
            # No copy is under way, and what is to be evaluated has been handed on.
            assert WeightsCopied(loop.trained) not in open_answers
            # What engines sample from now on can be trained: the pipeline never starves on its own bound.
            assert step - 1 - loop.installed <= plan.alpha
        case SwitchVersion():
            assert not any(isinstance(answer, EvaluationEnded) for answer in open_answers)
            if plan.barrier:  # no trajectory runs
                assert loop.formed == loop.opened
        case PublishVersion(number):
            assert number == loop.trained
            assert StepTrained(number + 1) not in open_answers, "its weights are those of no version"
