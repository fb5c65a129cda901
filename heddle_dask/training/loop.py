"""The training loop: what is done when. Pure: events in, commands out; simulation and live training share it.

A training step k takes a batch, and its result are weights number k. In the paper's order (RollArt, section 4.5) it is:
get batch k, switch the engines to weights k - 1, train. Weights are published while the loop waits for the next batch.
Without barriers a step does not wait for a publication that is slower than that: it is given as soon as the trainer has
a copy of the weights that are being published. How far it gets ahead is bounded by the age of samples, since batches
open by what is installed. Weights that were trained while older ones were being published are passed over, unless they
are to be evaluated.

Nothing here is a sequence of waits. After each event every command whose conditions hold is given, once; the conditions
are the methods `_may_…`. So any order of answers is right, and a resumed run only sets the counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from heddle_dask.training.plan import TrainingPlan


@dataclass(frozen=True, slots=True)
class BatchReady:
    """The answer to `FormBatch`: batch `step` is complete and on disk."""

    step: int


@dataclass(frozen=True, slots=True)
class StepTrained:
    """The answer to `TrainOnBatch`: its weights are there; after a crash its stored batch gives them again."""

    step: int


@dataclass(frozen=True, slots=True)
class WeightsCopied:
    """A first answer to `PublishVersion`: the trainer has a copy of weights `number`, and may train on.

    One that cannot train on meanwhile does without.
    """

    number: int


@dataclass(frozen=True, slots=True)
class PublishEnded:
    """The answer to `PublishVersion`: weights `number` are complete in the weight store."""

    number: int


@dataclass(frozen=True, slots=True)
class PublishLost:
    """The answer to `PublishVersion` of a trainer that died meanwhile: it has newer weights, and these no more."""

    number: int


@dataclass(frozen=True, slots=True)
class SwitchEnded:
    """The answer to `SwitchVersion`: every engine samples with weights `number`."""

    number: int


@dataclass(frozen=True, slots=True)
class EvaluationEnded:
    """The answer to `Evaluate`."""

    number: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The user wants the training to end, after what is being trained."""


@dataclass(frozen=True, slots=True)
class OpenBatches:
    """Tasks may be taken up until the batches 1 to `through` are full."""

    through: int


@dataclass(frozen=True, slots=True)
class FormBatch:
    """Take finished groups for training step `step`, as soon as there are enough; answer: `BatchReady`."""

    step: int


@dataclass(frozen=True, slots=True)
class TrainOnBatch:
    """Do training step `step`; answer: `StepTrained`."""

    step: int


@dataclass(frozen=True, slots=True)
class PublishVersion:
    """Write the weights after `number` training steps into the store; answers: `WeightsCopied`, then `PublishEnded`.

    The trainer has these weights now, and may have newer ones after its first answer.

    Attributes
    ----------
    evaluated
        They will be evaluated: should they be the best ones, they are kept.
    """

    number: int
    evaluated: bool = False


@dataclass(frozen=True, slots=True)
class SwitchVersion:
    """Let the engines go over to weights `number`; answer when all have: `SwitchEnded`.

    Rollout goes on meanwhile, except where the plan has barriers: there, no batch is open.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Try the held-out tasks with weights `number`, which every engine has; answer: `EvaluationEnded`.

    The engines keep these weights until the answer.
    """

    number: int


@dataclass(frozen=True, slots=True)
class EndTraining:
    """Nothing is left to do.

    Attributes
    ----------
    stopped
        The user asked for it; else all steps are done.
    """

    trained: int
    stopped: bool = False


LoopEvent = (
    BatchReady | StepTrained | WeightsCopied | PublishEnded | PublishLost | SwitchEnded | EvaluationEnded | StopAsked
)
LoopCommand = OpenBatches | FormBatch | TrainOnBatch | PublishVersion | SwitchVersion | Evaluate | EndTraining


LoopPhase = Literal["starting", "waiting for a batch", "switching", "training", "publishing", "evaluating", "done"]


@dataclass(frozen=True, slots=True)
class LoopStart:
    """Where a training begins or goes on.

    Attributes
    ----------
    trained
        Training steps that the trainer's weights contain.
    evaluated
        Numbers of the weights whose evaluation is stored.
    """

    trained: int = 0
    evaluated: frozenset[int] = frozenset()


class TrainingLoop:
    """The state of a training, and the next commands.

    Parameters
    ----------
    start
        Where it begins. Weights of a resumed training are published and installed again before rollout begins: engines
        may have been replaced meanwhile.

    Attributes
    ----------
    trained
        n: finished training steps.
    opened, formed
        Newest batch that may be rolled out; newest batch that is on disk.
    published, switched, installed
        Number of the newest weights that are in the store; that engines were told to install; that all engines have.

    Examples
    --------
    >>> loop = TrainingLoop(TrainingPlan(steps=1, alpha=0, depth=0, barrier=True, switch="before-batch"))
    >>> loop.begin()
    [OpenBatches(through=1), FormBatch(step=1)]
    >>> loop.handle(BatchReady(1))
    [TrainOnBatch(step=1)]
    """

    def __init__(self, plan: TrainingPlan, start: LoopStart | None = None) -> None:
        start = start or LoopStart()
        self.plan: Final = plan
        self.first: Final = start.trained
        self.trained = self.formed = start.trained
        self.opened = start.trained
        # Weights 0 are those with which the engines were started: nobody publishes them.
        self.published = self.switched = self.installed = 0
        # Weights of which the trainer has a copy, and those that died with a trainer; -1: none.
        self._copied = self._lost = -1
        self.is_stopped = False
        self.is_ended = False
        self._evaluated = set(start.evaluated)
        self._forming = self._training = self._evaluating = False
        self._publishing: int | None = None

    @property
    def phase(self) -> LoopPhase:
        if self.is_ended:
            return "done"
        if self._training:
            return "training"
        if self.switched > self.installed:
            return "switching"
        if self._forming:
            return "waiting for a batch"
        if self._publishing is not None:
            return "publishing"
        return "evaluating" if self._evaluating else "starting"

    def begin(self) -> list[LoopCommand]:
        return self._commands()

    def handle(self, event: LoopEvent) -> list[LoopCommand]:
        """Take one event and return what is to be done now, in this order."""
        match event:
            case BatchReady(step):
                assert self._forming and step == self.formed + 1, (event, self.formed)
                self._forming, self.formed = False, step
            case StepTrained(step):
                assert self._training and step == self.trained + 1, (event, self.trained)
                self._training, self.trained = False, step
            case WeightsCopied(number):
                assert number == self._publishing, (event, self._publishing)
                self._copied = number
            case PublishEnded(number):
                assert number == self._publishing, (event, self._publishing)
                self._publishing, self.published = None, number
            case PublishLost(number):
                assert number == self._publishing, (event, self._publishing)
                self._publishing, self._lost = None, number
            case SwitchEnded(number):
                assert number <= self.switched, (event, self.switched)
                self.installed = max(self.installed, number)
            case EvaluationEnded(number):
                assert self._evaluating and number == self.installed, (event, self.installed)
                self._evaluating = False
                self._evaluated.add(number)
            case StopAsked():
                self.is_stopped = True
        return self._commands()

    def _commands(self) -> list[LoopCommand]:
        """Give every command that may be given; one may make room for the next."""
        given: list[LoopCommand] = []
        while command := next(self._possible(), None):
            given.append(command)
        return given

    def _possible(self) -> Iterator[LoopCommand]:
        """The first command whose conditions hold, marked as given."""
        choices: tuple[Callable[[], LoopCommand | None], ...] = (
            self._end,
            self._publish,
            self._switch,
            self._evaluate,
            self._open,
            self._form,
            self._train,
        )
        for choose in choices:
            command = choose()
            if command is not None:
                yield command
                return

    def _end(self) -> EndTraining | None:
        if self.is_ended or not self._may_end():
            return None
        self.is_ended = True
        return EndTraining(self.trained, stopped=self.is_stopped)

    def _may_end(self) -> bool:
        if self.is_stopped:
            return not self._training
        # A resumed training may be asked for fewer steps than it has done.
        is_trained = self.trained >= self.plan.steps and self.installed == self.trained
        return is_trained and not self._owes_evaluation() and not self._evaluating

    def _publish(self) -> PublishVersion | None:
        is_new = self.trained not in (self.published, self._lost)
        is_held = self._training or self._publishing is not None  # the trainer has these weights between two steps
        if is_held or not is_new or self._passes_over_evaluated() or self._rests():
            return None
        self._publishing = self.trained
        return PublishVersion(self.trained, self._is_due(self.trained))

    def _passes_over_evaluated(self) -> bool:
        """Whether newer weights in the store would keep the engines from some that are to be evaluated."""
        return self.published > self.switched and self._is_due(self.published)

    def _switch(self) -> SwitchVersion | None:
        if self.published <= self.switched or not self._may_switch():
            return None
        self.switched = self.published
        return SwitchVersion(self.published)

    def _may_switch(self) -> bool:
        """Not while an evaluation needs its version, and where the plan says."""
        if self._rests() or self._is_due(self.switched):
            return False
        is_first_or_last = self.published in (self.first, self.plan.steps)
        if self.plan.switch == "before-batch" or is_first_or_last:
            return True
        # Where nothing is left to form, only the switch can open a batch.
        return self.formed > self.published or (self.formed == self.opened and not self._forming)

    def _evaluate(self) -> Evaluate | None:
        if self._evaluating or not self._owes_evaluation() or self._rests():
            return None
        self._evaluating = True
        return Evaluate(self.installed)

    def _owes_evaluation(self) -> bool:
        return self.installed == self.switched and self._is_due(self.installed)

    def _is_due(self, number: int) -> bool:
        """Whether weights `number` are to be evaluated and were not.

        A resumed training first brings its own weights to the engines.
        """
        return number >= self.first and self.plan.evaluates(number) and number not in self._evaluated

    def _open(self) -> OpenBatches | None:
        through = self._last_batch_to_open()
        if through <= self.opened or self._rests():
            return None
        self.opened = through
        return OpenBatches(through)

    def _last_batch_to_open(self) -> int:
        if self.installed < self.first:
            return self.opened
        # What begins now is sampled with the installed weights: for a later batch it would be too old.
        young_enough = self.installed + 1 + self.plan.alpha
        ahead = min(self.plan.steps, self.trained + 1 + self.plan.depth, young_enough)
        if not self.plan.barrier:
            return ahead
        batch = self.opened + 1
        is_free = self.formed == self.opened and self.installed >= self.plan.needed_version(batch)
        return batch if batch <= ahead and is_free else self.opened

    def _form(self) -> FormBatch | None:
        if self._forming or self.formed > self.trained or self.formed == self.opened or self._rests():
            return None
        self._forming = True
        return FormBatch(self.formed + 1)

    def _train(self) -> TrainOnBatch | None:
        is_ready = self.formed > self.trained and not self._training
        if not is_ready or not self._may_leave_weights() or self._rests():
            return None
        self._training = True
        return TrainOnBatch(self.formed)

    def _may_leave_weights(self) -> bool:
        """Whether nothing needs the trainer to keep its weights as they are."""
        if self.plan.barrier:
            # The switch was asked for: rollout goes over to the newer weights while the step is computed.
            return self._publishing is None and self.switched >= self.trained
        if self._publishing == self.trained:
            return self._copied == self.trained
        return self.trained in (self.published, self._lost) or not self._is_due(self.trained)

    def _rests(self) -> bool:
        return self.is_stopped or self.is_ended
