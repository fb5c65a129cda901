"""One rank of a trainer: weights, optimizer, and what is done with them at each order."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.training.advantages import advantage_function
from heddle_dask.training.batch_files import load_batch
from heddle_dask.training.groups import TrainingBatch
from heddle_dask.training.trainer import TrainerState, TrainReport
from heddle_dask.training.trainer_spec import TrainerSpec
from heddle_dask.weights.manifest import ModelFacts
from heddle_dask.weights.model_directory import model_facts
from pipelines.grpo.batch_step import BatchStep
from pipelines.grpo.checkpoint_files import (
    random_state,
    read_trainer_state,
    restore_random_state,
    write_model,
    write_trainer_state,
)
from pipelines.grpo.checkpoint_folder import CheckpointFolder, CheckpointRecord, read_record
from pipelines.grpo.losses import loss_function
from pipelines.grpo.policy import Policy, device_of, load_reference
from pipelines.grpo.progress import PROGRESS
from pipelines.grpo.sequences import TrainedSequence, trained_sequences
from pipelines.grpo.step_metrics import learning_rate


class Learner:
    """Trains on batches, one after the other. With several ranks, all of them are given the same orders.

    It begins with the newest checkpoint of its lineage, else with `TrainerSpec.start`, else with the model.

    Attributes
    ----------
    between_checkpoints
        Whether its weights may be those of no checkpoint: a step has begun and has not been written, or has failed.
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
        self.between_checkpoints = False
        self.folder = CheckpointFolder(Path(spec.checkpoints), spec.lineage, spec.keep_checkpoints)
        self._facts = model_facts(spec.model)
        self._reference = self._load_reference()
        self._load()

    def _load_reference(self) -> Any:
        spec = self.spec
        if not spec.kl_coefficient or (spec.lora_rank and not spec.reference):
            return None  # an adapter is switched off instead
        return load_reference(spec, self._device)

    def _load(self) -> None:
        spec = self.spec
        self.state = first_state(spec)
        checkpoint = self.state.checkpoint
        self._policy = Policy(spec, checkpoint or Path(spec.model), self._device)
        options: dict[str, Any] = {
            "betas": (spec.beta1, spec.beta2),
            "eps": spec.adam_epsilon,
            "weight_decay": spec.weight_decay,
        }
        self._optimizer = torch.optim.AdamW(self._policy.trained, lr=spec.learning_rate, **options)
        if checkpoint is not None:
            stored = read_trainer_state(checkpoint)
            if stored["master"] is not None:
                self._policy.restore(stored["master"])
            self._policy.restore_optimizer(self._optimizer, stored["optimizer"])
            for group in self._optimizer.param_groups:
                group.update(options)  # those of this run, and not of the one that wrote the checkpoint
            if self.rank < len(stored["random"]):
                restore_random_state(stored["random"][self.rank])

    def catch_up(self) -> None:
        """Load the newest checkpoint, where another process has written a newer one than this one's weights."""
        newest = self.folder.newest()
        if newest is not None and newest[1].number > self.state.version.number:
            self._load()

    def check(self, batch: TrainingBatch, version: PolicyVersion) -> list[TrainedSequence]:
        """What a batch has to train, or why it cannot be trained now. Changes nothing."""
        if version.lineage != self.spec.lineage:
            raise BadInput(f"version {version} is of another lineage: this trainer's is {self.spec.lineage}")
        if version.number != self.state.version.number + 1:
            raise BadInput(f"version {version} does not follow {self.state.version}: train the batches in order")
        if batch.step != version.number:
            raise BadInput(f"batch {batch.step} cannot give version {version}: give batch {version.number}")
        return trained_sequences(batch, self._advantages, self._policy.vocabulary, self._policy.longest)

    def train(self, path: Path, version: PolicyVersion) -> TrainReport:
        """Train on a stored batch and write a checkpoint. A batch that `check` refuses changes nothing."""
        began_s = time.perf_counter()
        batch = load_batch(path)
        sequences = self.check(batch, version)
        loaded_s = time.perf_counter()
        PROGRESS.made()
        number = version.number - 1
        rate = learning_rate(self.spec, version.number)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self.between_checkpoints = True
        step = BatchStep(self._policy, self._optimizer, self._loss, self._reference, self.rank, number)
        metrics, seconds = step.run(sequences)
        metrics["learning_rate"] = rate
        members = [member for group in batch.groups for member in group.members]
        metrics["truncated_share"] = sum(member.truncated for member in members) / len(members)
        metrics["tokens_per_s"] = sum(one.length for one in sequences) / (seconds["prox"] + seconds["train"])
        written_s = time.perf_counter()
        seconds = {"load": loaded_s - began_s, **seconds}
        path = self._write(CheckpointRecord(version.lineage, version.number, _digest(self._facts), metrics, seconds))
        self.state = TrainerState(version, path)
        self.between_checkpoints = False
        seconds = {**seconds, "checkpoint": time.perf_counter() - written_s}
        return TrainReport(self.state, metrics, seconds)

    def _write(self, record: CheckpointRecord) -> Path:
        state = self._policy.state()
        optimizer = self._policy.optimizer_state(self._optimizer)
        random_states = [random_state()]
        if self.spec.ranks > 1:
            gathered: list[Any] = [None] * self.spec.ranks
            dist.all_gather_object(gathered, random_states[0])
            random_states = gathered
        path = Path(self.spec.checkpoints)
        if self.rank == 0:

            def fill(directory: Path) -> None:
                write_model(directory, self._policy, state)
                write_trainer_state(directory, self._policy, state, optimizer, random_states)

            path = self.folder.write(record, fill)
        if self.spec.ranks > 1:
            # No rank goes on before the checkpoint is on disk.
            dist.barrier()
        return path

    def export_merged(self, directory: Path) -> None:
        """Write the model with its adapter merged into it; the trained weights stay as they are."""
        spec = self.spec
        if not spec.lora_rank:
            raise BadInput("no adapter is trained: each checkpoint is a whole model")
        if directory.exists():
            raise BadInput(f"{directory} exists: give another directory")
        source = self.state.checkpoint
        if source is None:
            raise BadInput("there is no checkpoint yet: train a batch first")
        plain = replace(spec, ranks=1, dtype="float32")
        merged = Policy(plain, source, torch.device("cpu"))
        merged.model = merged.model.merge_and_unload()
        merged.spec = replace(plain, lora_rank=0)
        tied = getattr(merged.model, "all_tied_weights_keys", None) or {}
        state = {name: tensor for name, tensor in merged.model.state_dict().items() if name not in tied}
        write_model(directory, merged, state)


def stored_report(folder: CheckpointFolder, version: PolicyVersion) -> TrainReport | None:
    """The report of a batch that was trained already: its checkpoint has it."""
    path = folder.find(version)
    if path is None:
        return None
    record = read_record(path)
    return TrainReport(TrainerState(version, path), record.metrics, record.seconds)


def first_state(spec: TrainerSpec) -> TrainerState:
    """Where a trainer begins, by the files there are."""
    facts = model_facts(spec.model)
    if spec.kl_coefficient and spec.reference and model_facts(spec.reference) != facts:
        raise BadInput(f"reference {spec.reference} is of another model than {spec.model}: shape or tokenizer differ")
    newest = CheckpointFolder(Path(spec.checkpoints), spec.lineage, spec.keep_checkpoints).newest()
    checkpoint = newest[0] if newest else Path(spec.start) if spec.start else None
    if checkpoint is None:
        return TrainerState(PolicyVersion(spec.lineage, 0))
    record = read_record(checkpoint)
    if record.model != _digest(facts):
        raise BadInput(f"checkpoint {checkpoint} is of another model than {spec.model}: shape or tokenizer differ")
    return TrainerState(PolicyVersion(spec.lineage, record.number), checkpoint)


def check_spec(spec: TrainerSpec) -> None:
    """Refuse what cannot begin, before any process or any weights are loaded for it."""
    loss_function(spec.loss)
    advantage_function(spec.advantages)
    device_of(spec, 0)
    first_state(spec)


def _digest(facts: ModelFacts) -> str:
    return f"{facts.config_digest}-{facts.tokenizer_digest}"
