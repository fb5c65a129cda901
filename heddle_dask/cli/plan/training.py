"""``heddle plan --train``: the trainer beside the rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from heddle_dask.cli.plan.split import SplitAnswer, SplitRequest, split_answer
from heddle_dask.cli.train.order import trainer_options
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.gpu_split import Overlap, scaling_law, split_of
from heddle_dask.cost.hardware import Gpu
from heddle_dask.cost.published import config_of, gpu_of, model_of
from heddle_dask.cost.training_memory import PEAK_SHARE, TrainedModel, TrainerSetup
from heddle_dask.sim.trainer_plan import BatchTokens, TrainerOnGpus, TrainerPlan
from heddle_dask.training.plan import plan_of_mode

if TYPE_CHECKING:
    from heddle_dask.sim.clusters import Cluster
    from heddle_dask.sim.plan import PlayedCandidate
    from heddle_dask.workloads.planned import PlannedTrajectory

BATCH = 64
"""Trajectories of a batch of ``heddle train`` unless it is told otherwise."""
_PARTS = ("states", "gathered", "activations", "logits", "workspace")


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """What the options say of a training; `batch` trajectories are a step's."""

    plan: TrainerPlan
    batch: int
    overlap: Overlap

    @classmethod
    def of(
        cls,
        model: str,
        gpus: Sequence[int],
        described: Cluster,
        max_context_tokens: int,
        options: Mapping[str, Any],
    ) -> TrainRequest:
        """From ``--lora``, ``--trainer``, ``--batch``, ``--overlap`` and ``--total-gpus``."""
        if options["total_gpus"] is not None:
            raise BadInput("--total-gpus is of --trainer-s: with --train, --gpus are those of trainer and engines")
        if len(gpus) > 1:
            raise BadInput(f"--gpus names {len(gpus)} numbers: with --train give one, of trainer and engines together")
        trained = TrainedModel.of_config(config_of(model), model)
        chosen = trainer_options({"lr": 1e-5, "trainer_ranks": 1, "seed": 0, **options})
        if chosen["ranks"] != 1 or "shares_gpus" in chosen:
            raise BadInput("--trainer ranks and shares_gpus are what --train plans: leave them out")
        setup = _setup(chosen, max_context_tokens, int(model_of(model).weight_bytes) // trained.parameters)
        gpu: Gpu = gpu_of(described.gpu)
        plan = TrainerPlan(
            name=model, model=trained, setup=setup, gpu=gpu, gpus=gpus[0], gpus_per_node=described.gpus_per_node
        )
        return cls(plan, options["batch"] or BATCH, options["overlap"])

    def simulated_trajectories(self, samples: int) -> int:
        """As many as run at once by the mode's defaults, so that the longest ones last no longer than their bound."""
        batches = 1 if self.plan.shares else 1 + plan_of_mode(self.overlap, steps=1).depth
        return -(-self.batch * batches // samples) * samples

    def answer(
        self,
        best: Sequence[PlayedCandidate],
        drawn: Sequence[PlannedTrajectory],
        trainer_s: str | None,
        update_s: float,
    ) -> TrainAnswer:
        """The best split beside these fleets; `trainer_s` in place of computed seconds, as `scaling_law` reads it."""
        tokens = BatchTokens.of(drawn, self.batch)
        law = scaling_law(trainer_s) if trainer_s else lambda gpus: self.plan.on(gpus, tokens).step_s
        choices = self.plan.fitting()
        request = SplitRequest(
            law,
            trainer_s or f"computed at {PEAK_SHARE} of the peak",
            self.plan.gpus,
            self.overlap,
            self.batch,
            update_s,
            tuple(choices),
        )
        if self.plan.shares:
            rollout_s = best[0].makespan_s * self.batch / len(drawn)
            only = split_of(1, 1, law, lambda gpus: rollout_s, "sync", update_s)
            split = SplitAnswer(replace(request, overlap="sync"), only, (only,), {1: rollout_s})
        else:
            split = _roomiest(split_answer(request, best, len(drawn), self.plan.gpus_per_node))
        nearest = min(best, key=lambda one: abs(one.gpus - split.best.rollout_gpus))
        return TrainAnswer(self, split, self.plan.on(split.best.trainer_gpus, tokens), tokens, nearest)


@dataclass(frozen=True, slots=True)
class TrainAnswer:
    """The chosen trainer, its batch, and the simulated engines that are nearest to the chosen number of GPUs."""

    request: TrainRequest
    split: SplitAnswer
    trainer: TrainerOnGpus
    tokens: BatchTokens
    engines: PlayedCandidate

    @property
    def tp_degree(self) -> int:
        return self.engines.candidate.tp_degrees[0]

    @property
    def engine_count(self) -> int:
        return self.split.best.rollout_gpus // self.tp_degree

    @property
    def kv_tokens(self) -> int:
        described, _ = self.engines.candidate.fleet.engines[0]
        return described.kv_capacity_tokens or 0

    @property
    def in_turn_s(self) -> float:
        return self.split.best.trainer_s + self.split.best.rollout_s + self.split.request.update_s

    def lines(self) -> list[str]:
        """Memory and minutes of the chosen split, what helps where memory is short, and the command."""
        plan, needs, best = self.request.plan, self.trainer.needs, self.split.best
        kept = f"LoRA {plan.setup.lora_rank}" if plan.setup.lora_rank else "all weights"
        each = ", ".join(f"{name} {getattr(needs, name) / 1e9:.1f}" for name in _PARTS)
        overlap = "sync (trainer and engine share the GPU)" if plan.shares else self.request.overlap
        saved = ", ".join(f"{name} {bytes_ / 1e9:.1f} GB" for name, bytes_ in plan.savings(best.trainer_gpus).items())
        return [
            f"trainer ({kept}, passes of {plan.setup.pass_tokens:,} tokens), computed: "
            f"{needs.needed_memory_bytes / 1e9:.1f} of {plan.gpu.memory_bytes / 1e9:.0f} GB on each of its GPUs "
            f"({each}); room for passes of {self.trainer.most_pass_tokens:,}",
            f"engines: {self.engine_count} x TP{self.tp_degree}, {plan.engine_memory_share():.0%} of each GPU, room "
            f"for {self.kv_tokens / 1e3:,.0f} k tokens of KV in each engine",
            f"a step of {self.request.batch} trajectories ({self.tokens.tokens / 1e3:,.0f} k tokens): rollout "
            f"{best.rollout_s / 60:.1f} min (simulated), training {best.trainer_s / 60:.1f} min "
            f"({self.split.request.told}); {overlap}: {best.step_s / 60:.1f} min; one after the other: at "
            f"least {self.in_turn_s / 60:.1f} min",
            f"where memory is short, saved on each GPU: {saved}",
            self._command(),
        ]

    def figures(self) -> dict[str, Any]:
        needs, best = self.trainer.needs, self.split.best
        return {
            "batch": self.request.batch,
            "batch_tokens": round(self.tokens.tokens),
            "trainer_gpus": best.trainer_gpus,
            "engines": self.engine_count,
            "tp_degree": self.tp_degree,
            "kv_tokens": self.kv_tokens,
            "engine_memory_share": self.request.plan.engine_memory_share(),
            "bytes_on_each_gpu": {name: round(getattr(needs, name)) for name in (*_PARTS, "needed_memory_bytes")},
            "pass_tokens": self.request.plan.setup.pass_tokens,
            "most_pass_tokens": self.trainer.most_pass_tokens,
            "rollout_s": round(best.rollout_s, 3),
            "trainer_s": round(best.trainer_s, 3),
            "step_s": round(best.step_s, 3),
            "in_turn_s": round(self.in_turn_s, 3),
            "saved_bytes": {name: round(value) for name, value in self.request.plan.savings(best.trainer_gpus).items()},
        }

    def _command(self) -> str:
        plan, tp = self.request.plan, self.tp_degree
        words = [f"heddle train --model DIR --engines {self.engine_count * tp}"]
        if tp > 1:
            words.append("--tp " + ",".join([str(tp)] * self.engine_count))
        if plan.shares:
            words.append(f"--trainer shares_gpus=true --gpu-memory-utilization {plan.engine_memory_share():.2f}")
        else:
            words.append(f"--trainer-ranks {self.split.best.trainer_gpus}")
        if plan.setup.lora_rank:
            words.append(f"--lora {plan.setup.lora_rank}")
        words.append(f"--batch {self.request.batch} …")
        return " ".join(words)


def _roomiest(answer: SplitAnswer) -> SplitAnswer:
    """Of the splits that are as fast within 1 %, that with most GPUs for the trainer: it has most room there."""
    fast = [one for one in answer.tried if one.step_s <= 1.01 * answer.best.step_s]
    return replace(answer, best=max(fast, key=lambda one: one.trainer_gpus))


def _setup(chosen: Mapping[str, Any], max_context_tokens: int, stored_bytes: int) -> TrainerSetup:
    item_bytes = {"float32": 4, "bfloat16": 2}.get(chosen.get("dtype", "auto"), stored_bytes)
    setup = TrainerSetup(
        lora_rank=chosen.get("lora_rank", 0),
        # A sequence that is longer than a micro-batch is one of its own.
        pass_tokens=max(chosen.get("micro_batch_tokens", TrainerSetup().pass_tokens), max_context_tokens),
        item_bytes=item_bytes,
        recompute=chosen.get("gradient_checkpointing", True) is not False,
    )
    compares = bool(chosen.get("kl_coefficient"))
    passes = chosen.get("passes", 1)
    return replace(
        setup,
        # An adapter is switched off instead.
        reference=compares and bool(chosen.get("reference") or not setup.lora_rank),
        passes=passes,
        forwards=compares + (passes * chosen.get("parts", 1) > 1),
    )
