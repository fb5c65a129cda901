"""The options of ``heddle train``, parsed and checked against one another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from heddle_dask.cli.engine_option import chosen_model, parsed_vllm_options
from heddle_dask.cli.field_options import Asked
from heddle_dask.core.errors import BadInput
from heddle_dask.core.run_description import StalenessBound, WeightUpdatePolicy
from heddle_dask.cost.model_config import read_config
from heddle_dask.engines.spec import EngineOptions, ReceivesBroadcasts, engine_kind
from heddle_dask.environments.loading import training_name
from heddle_dask.environments.mix import parse_mix
from heddle_dask.live.driver.options import Budget, Sampling
from heddle_dask.live.training.trackers import check_tracker
from heddle_dask.training.groups import GroupPlan
from heddle_dask.training.mismatch import MismatchRule
from heddle_dask.training.plan import TrainingPlan, plan_of_mode
from heddle_dask.training.prefix_sampling import PrefixRule
from heddle_dask.training.run_directory import DirectoryMode, TrainingDirectory
from heddle_dask.training.sample_buffer import BatchRule
from heddle_dask.training.trainable_sampling import check_trainable_sampling
from heddle_dask.training.trainer_spec import TrainerSpec
from heddle_dask.weights.collective import CollectiveUri, is_collective

ONE_EVALUATION_LESS = 10**9
"""``--eval-every`` when only the first and the last weights are evaluated: no training has as many steps."""


@dataclass(frozen=True, slots=True)
class EvaluationOrder:
    """What ``--eval-…`` say; `tasks` 0: nothing is evaluated."""

    tasks: int
    every: int
    samples: int
    temperature: float


@dataclass(frozen=True, slots=True)
class TrainOrder:
    """One training as ordered on the command line.

    Attributes
    ----------
    rollout
        The options of its rollout: how and where trajectories are rolled out.
    store
        URI of the weight store; None: in the directory.
    trainer
        Fields of `TrainerSpec`, but for the model, the lineage and where checkpoints are.
    """

    rollout: Asked
    plan: TrainingPlan
    groups: GroupPlan
    rule: BatchRule
    directory: TrainingDirectory
    mode: DirectoryMode
    store: str | None
    trainer: Mapping[str, Any]
    evaluation: EvaluationOrder
    report_to: tuple[str, ...]
    mismatch: MismatchRule = "end"

    @classmethod
    def of(cls, asked: Asked) -> TrainOrder:
        """Check and group the values of all options."""
        options = asked.values
        directory = TrainingDirectory(options["out"])
        mode: DirectoryMode = "create"
        if options["resume"] or options["overwrite"]:
            mode = "resume" if options["resume"] else "overwrite"
        check_sampling(asked.object_of(Sampling))
        check_store_uri(options["store"], options["engine"])
        for name in options["report_to"]:
            check_tracker(name)
        evaluation = EvaluationOrder(
            options["eval_tasks"],
            options["eval_every"] or ONE_EVALUATION_LESS,
            options["eval_samples"],
            options["eval_temperature"],
        )
        plan = plan_of_mode(
            options["mode"],
            options["steps"],
            alpha=options["alpha"],
            depth=options["depth"],
            switch=options["switch"],
            evaluate_every=evaluation.every if evaluation.tasks else 0,
        )
        groups, rule = _groups(options, plan)
        directory.check(mode)
        return cls(
            _rollout_options(asked, directory),
            plan,
            groups,
            rule,
            directory,
            mode,
            options["store"],
            trainer_options(options),
            evaluation,
            tuple(options["report_to"]),
            options["mismatch"],
        )

    def description(self, model: str, tokenizer: str) -> dict[str, Any]:
        """For ``run.json``: what a resumed training must have in common with this one, and what it may change."""
        rollout = self.rollout
        return {
            "environment": rollout["env"],
            "reward": rollout["reward"],
            "model": model,
            "tokenizer": tokenizer,
            "groups": self.groups.groups_per_batch,
            "samples": self.groups.members,
            "seed": rollout["seed"],
            "temperature": rollout["temperature"],
            "truncated": self.rule.truncated,
            "limits": list(rollout.object_of(Budget).replayed.values()),
            "lora_rank": self.trainer.get("lora_rank", 0),
            "steps": self.plan.steps,
            "learning": {**self.trainer, **asdict(self.plan), **asdict(self.groups)},
            "evaluation": asdict(self.evaluation),
            "engines": [rollout["engine"], rollout["engines"]],
        }


def check_sampling(sampling: Sampling) -> None:
    """Refuse sampling whose tokens cannot be trained on."""
    check_trainable_sampling(
        "heddle train", **{name: value for name, value in asdict(sampling).items() if name != "seeded"}
    )


def check_store_uri(store: str | None, engine: str) -> None:
    """Refuse a broadcast without an address, or to engines that receive none."""
    if store is None or not is_collective(store):
        return
    CollectiveUri.parse(store)
    if not isinstance(engine_kind(engine), ReceivesBroadcasts):
        raise BadInput(
            f"--store {store}: {engine} engines receive no broadcast weights; use --engine vllm, or a directory or URL"
        )


def _groups(options: Mapping[str, Any], plan: TrainingPlan) -> tuple[GroupPlan, BatchRule]:
    samples = options["samples"]
    trajectories = options["batch"] or options["groups"] * samples
    groups = trajectories // samples
    running = (groups + options["extra_groups"]) * (samples + options["extra_samples"])
    bound = StalenessBound(
        plan.alpha,
        options["staleness"],
        trajectories,
        redundant_trajectories=running - groups * samples,
    )
    is_redundant = options["extra_groups"] > 0 or options["extra_samples"] > 0
    rule = BatchRule.of(bound, samples, waits_for_oldest=not is_redundant, truncated=options["truncated"])
    plan_of_groups = GroupPlan(
        samples,
        options["extra_samples"],
        rule.groups,
        options["extra_groups"],
        options["late"],
        max_repeats=options["max_repeats"],
        staleness=bound,
        weights=WeightUpdatePolicy(order=options["update_order"], keep_kv=options["keep_kv"]),
        prefixes=PrefixRule() if options["prefix_sampling"] else None,
    )
    return plan_of_groups, rule


def _rollout_options(asked: Asked, directory: TrainingDirectory) -> Asked:
    """The options of a training's rollout, with what only other rollouts have left out."""
    parts = parse_mix(asked["env"])
    env = ",".join(f"{training_name(part.spec)}={part.weight:g}" for part in parts)
    resumes = asked["resume"] and directory.rollout.exists()
    return asked.but(
        env=env if len(parts) > 1 else training_name(parts[0].spec),
        out=directory.rollout,
        mode="resume" if resumes else "create",
        tasks=1,
        run_timeout=None,
        token_scale=None,
        tool_scale=None,
        logprobs="processed" if "logprobs" in engine_kind(asked["engine"]).options_type.names() else None,
        dtype=engine_dtype(
            asked["dtype"], asked["engine"], asked["model"], parsed_vllm_options(asked["engine"], asked.values)
        ),
    )


def engine_dtype(asked: str, engine: str, model: str | None, options: EngineOptions | None = None) -> str:
    """The type in which engines run: float32 for a model stored so, which vLLM's ``auto`` casts to a half type.

    The trainer computes in float32, and its logprobs are compared with the engines'.
    """
    if asked != "auto" or engine_kind(engine).takes_cost:
        return asked
    config = read_config(chosen_model(model, engine, options))
    return "float32" if "float32" in (config.get("dtype"), config.get("torch_dtype")) else asked


def trainer_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `TrainerSpec` from ``--lr``, ``--lora`` and ``--trainer KEY=VALUE``."""
    chosen: dict[str, Any] = {
        "learning_rate": options["lr"],
        "ranks": options["trainer_ranks"],
        "seed": options["seed"],
    }
    if options["lora"] is not None:
        chosen["lora_rank"] = options["lora"]
    allowed = [field.name for field in fields(TrainerSpec) if field.name not in _OF_LOOP]
    for text in options["trainer_set"]:
        key, equals, value = text.partition("=")
        if not equals or key not in allowed:
            raise BadInput(f"--trainer {text}: use KEY=VALUE with one of {', '.join(allowed)}")
        chosen[key] = _value(value)
    TrainerSpec(model="model", checkpoints="checkpoints", lineage="lineage", **chosen)
    return chosen


_OF_LOOP: Sequence[str] = ("model", "checkpoints", "lineage", "start", "batches")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_out_parent(directory: Path) -> None:
    """Refuse a directory that cannot be made, before a cluster starts."""
    parent = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not parent.is_dir():
        raise BadInput(f"--out {directory}: {parent} is no directory")
