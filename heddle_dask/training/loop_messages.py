"""What happens to the training loop (events), and what it wants done (commands). Both are data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchReady:
    """The answer to `FormBatch`: batch `step` is complete and on disk."""

    step: int


@dataclass(frozen=True, slots=True)
class StepTrained:
    """The answer to `TrainOnBatch`: the optimiser step is in a checkpoint on disk."""

    step: int


@dataclass(frozen=True, slots=True)
class PublishEnded:
    """The answer to `PublishVersion`: weights `number` are complete in the weight store."""

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
    """Do training step `step` and write a checkpoint; answer: `StepTrained`."""

    step: int


@dataclass(frozen=True, slots=True)
class PublishVersion:
    """Write the weights after `number` training steps into the store; answer: `PublishEnded`."""

    number: int


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
    trained
        Training steps that are done.
    stopped
        The user asked for it; else all steps are done.
    """

    trained: int
    stopped: bool = False


LoopEvent = BatchReady | StepTrained | PublishEnded | SwitchEnded | EvaluationEnded | StopAsked
LoopCommand = OpenBatches | FormBatch | TrainOnBatch | PublishVersion | SwitchVersion | Evaluate | EndTraining
