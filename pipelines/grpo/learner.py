"""One rank of a trainer: weights, optimizer, and what is done with them at each order."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.training.advantages import advantage_function
from heddle_dask.training.batch_files import load_batch
from heddle_dask.training.groups import TrainingBatch
from heddle_dask.training.trainer_spec import TrainerSpec
from heddle_dask.weights.manifest import ModelFacts
from heddle_dask.weights.model_directory import model_facts
from pipelines.grpo.batch_step import BatchStep
from pipelines.grpo.checkpoint_folder import CheckpointFolder, CheckpointRecord, read_record
from pipelines.grpo.checkpoint_state import ShardedState
from pipelines.grpo.losses import loss_function
from pipelines.grpo.model_files import Weights, write_model
from pipelines.grpo.policy import Policy, device_of, load_reference
from pipelines.grpo.progress import PROGRESS
from pipelines.grpo.publishing import Publisher
from pipelines.grpo.sequences import TrainedSequence, trained_sequences
from pipelines.grpo.step_metrics import learning_rate


class Learner:
    """Trains on batches, one after the other. With several ranks, all of them are given the same orders.

    It begins with the newest checkpoint of its lineage, else with `TrainerSpec.start`, else with the model.

    Attributes
    ----------
    record
        Version of its weights, and the report of the step that made them.
    is_between_versions
        Whether its weights may be those of no version: a step has begun and has not ended, or has failed.
    """

    def __init__(self, spec: TrainerSpec, rank: int = 0) -> None:
        self.spec = spec
        self.rank = rank
        self._loss = loss_function(spec.loss)
        self._advantages = advantage_function(spec.advantages)
        self._device = device_of(spec, rank)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        torch.manual_seed(spec.seed)
        self.is_between_versions = False
        self._reference = self._load_reference()
        self.policy = Policy(spec, self._device)
        self.publisher = Publisher(self.policy)
        self._optimizer = torch.optim.AdamW(
            self.policy.trained,
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            eps=spec.adam_epsilon,
            weight_decay=spec.weight_decay,
        )
        self._state = ShardedState(self.policy, self._optimizer, rank)
        checkpoint, self.record = first_state(spec)
        if checkpoint is not None:
            self._state.load(checkpoint)

    def _load_reference(self) -> Any:
        spec = self.spec
        if not spec.kl_coefficient or (spec.lora_rank and not spec.reference):
            return None  # an adapter is switched off instead
        return load_reference(spec, self._device)

    @property
    def version(self) -> PolicyVersion:
        return self.record.version

    def check(self, batch: TrainingBatch, version: PolicyVersion) -> list[TrainedSequence]:
        """What a batch has to train, or why it cannot be trained now. Changes nothing."""
        if version.lineage != self.spec.lineage:
            raise BadInput(f"version {version} is of another lineage: this trainer's is {self.spec.lineage}")
        if version.number != self.version.number + 1:
            raise BadInput(f"version {version} does not follow {self.version}: train the batches in order")
        if batch.step != version.number:
            raise BadInput(f"batch {batch.step} cannot give version {version}: give batch {version.number}")
        return trained_sequences(batch, self._advantages, self.policy.vocabulary, self.policy.longest)

    def train(self, path: Path, version: PolicyVersion) -> None:
        """Train on a stored batch; `record` says how. A batch that `check` refuses changes nothing."""
        began_s = time.perf_counter()
        batch = load_batch(path)
        sequences = self.check(batch, version)
        loaded_s = time.perf_counter()
        PROGRESS.made()
        number = version.number - 1
        rate = learning_rate(self.spec, version.number)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self.is_between_versions = True
        step = BatchStep(self.policy, self._optimizer, self._loss, self._reference, self.rank, number)
        metrics, seconds = step.run(sequences)
        metrics["learning_rate"] = rate
        members = [member for group in batch.groups for member in group.members]
        metrics["truncated_share"] = sum(member.truncated for member in members) / len(members)
        metrics["tokens_per_s"] = sum(one.length for one in sequences) / (seconds["prox"] + seconds["train"])
        seconds = {"load": loaded_s - began_s, **seconds}
        self.record = replace(self.record, number=version.number, metrics=metrics, seconds=seconds)
        self.is_between_versions = False

    def save(self, directory: Path) -> Future[Any]:
        """Copy its shard to the host's memory, and begin to write it; the answer comes when all ranks have written."""
        return self._state.save(directory)

    def copied_weights(self) -> Weights:
        """A copy in the type of the model's files; all ranks ask, the first gets it."""
        return self.policy.copied_weights(self.publisher.dtype, self.rank)

    def export(self, directory: Path, weights: Weights) -> None:
        """Write a copy of its weights as a model directory; an adapter is merged with the model."""
        if directory.exists():
            raise BadInput(f"{directory} exists: give another directory")
        if not self.spec.lora_rank:
            write_model(directory, self.policy, weights)
            return
        plain = replace(self.spec, ranks=1, dtype="float32")
        merged = Policy(plain, torch.device("cpu"))
        merged.model.load_state_dict(weights, strict=False)
        merged.model = merged.model.merge_and_unload()
        merged.spec = replace(plain, lora_rank=0)
        tied = getattr(merged.model, "all_tied_weights_keys", None) or {}
        write_model(directory, merged, {n: t for n, t in merged.model.state_dict().items() if n not in tied})


def first_state(spec: TrainerSpec) -> tuple[Path | None, CheckpointRecord]:
    """The checkpoint that a trainer begins with, by the files there are; None: with the model."""
    facts = model_facts(spec.model)
    if spec.kl_coefficient and spec.reference and model_facts(spec.reference) != facts:
        raise BadInput(f"reference {spec.reference} is of another model than {spec.model}: shape or tokenizer differ")
    newest = CheckpointFolder(Path(spec.checkpoints), spec.lineage, spec.keep_checkpoints).newest()
    checkpoint = newest[0] if newest else Path(spec.start) if spec.start else None
    if checkpoint is None:
        return None, CheckpointRecord(spec.lineage, 0, _digest(facts))
    record = read_record(checkpoint)
    if record.model != _digest(facts):
        raise BadInput(f"checkpoint {checkpoint} is of another model than {spec.model}: shape or tokenizer differ")
    return checkpoint, replace(record, lineage=spec.lineage)


def check_spec(spec: TrainerSpec) -> None:
    """Refuse what cannot begin, before any process or any weights are loaded for it."""
    loss_function(spec.loss)
    advantage_function(spec.advantages)
    device_of(spec, 0)
    first_state(spec)


def _digest(facts: ModelFacts) -> str:
    return f"{facts.config_digest}-{facts.tokenizer_digest}"
