"""The description of a trainer of `pipelines.grpo`: plain data that travels by pickle and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from heddle_dask.core.errors import BadInput, check_keys, is_finite
from heddle_dask.core.ids import PolicyVersion

LengthNormalisation = Literal["batch", "sequence", "constant"]
RateSchedule = Literal["constant", "linear", "cosine"]
TrainingDtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """How to train, and from which weights.

    Attributes
    ----------
    model
        Hugging Face directory of a causal language model: configuration, tokenizer, and the weights of version 0.
    checkpoints
        Directory for checkpoints; each is a directory ``step-000012`` in it. Models are in ``models`` there.
    batches
        Directory of the stored batches: what is in no checkpoint is trained again from it when weights are published
        or saved; empty: only when a batch is trained.
    lineage
        Name of this line of training (`core.ids`).
    start
        The checkpoint that the line begins with; empty: `model`.
    learning_rate, warmup_steps, schedule, schedule_steps
        Peak rate of AdamW, batches of linear warm-up, and what follows: ``"linear"`` and ``"cosine"`` end at 0 after
        `schedule_steps` batches.
    max_grad_norm
        Gradients are scaled down to this norm.
    parts, passes
        Each pass over a batch does one optimiser step for each of `parts` parts. With one part and one pass, the ratio
        of policies is 1 and nothing is clipped.
    clip_low, clip_high
        The ratio of the policy to the one before the batch is clipped to [1 - clip_low, 1 + clip_high].
    importance_cap
        C: largest weight of a token, (policy before the batch) / (policy that sampled it).
    ratio_limit
        A token whose weight is above this, or below its inverse, is not trained: masked importance sampling, for
        engines that differ from the trainer. 0: all are, with weights up to C (truncated importance sampling).
    kl_coefficient
        Weight of the divergence from the `reference`; 0: none is computed.
    reference
        Model directory; empty: `model`.
    normalisation
        ``"batch"``: the mean over all trained tokens of the batch. ``"sequence"``: the mean over trajectories of the
        mean over tokens. ``"constant"``: the sum over tokens, divided by the number of trajectories times
        `constant_tokens`.
    loss
        ``package.module:function`` in place of ours (docs/trainer.md); empty: ours.
    advantages
        A name of `training.advantages.ADVANTAGES`, or ``package.module:function``.
    micro_batch_tokens
        Most tokens of one forward pass; a longer sequence is one of its own.
    packed
        Sequences lie behind one another in one row, without attention between them; else each is a row, padded.
    dtype
        Of the computation: weights, activations and gradients of a layer while it runs. ``"auto"``: bfloat16 for a
        model that is stored in two bytes, else float32. Master weights, gradients between layers' runs, their sums
        over ranks and micro-batches, and the optimiser's state are float32 and sharded over the ranks; below an
        adapter the model itself stays in the type of the computation.
    device
        ``"cpu"``, ``"cuda"``, or ``"auto"``: cuda where there is one.
    ranks
        Processes that share each batch (FSDP2), one for each GPU.
    shares_gpus
        False: the ranks have GPUs that no engine and no model service uses. True: the first that the trainer sees,
        whatever else runs there.
    threads
        CPU threads of each process; None: as the worker says, else 1.
    gradient_checkpointing
        Compute activations again in the backward pass, which saves memory and changes no bit. ``"auto"``: on a GPU,
        and wherever the computation is in bfloat16.
    silence_s
        Least time without progress (a pass over a micro-batch) after which the process is ended, and another one is
        given the order. A longer pause before makes it longer: ten times that.
    checkpoint_every_s
        Seconds between two checkpoints, which are written while training goes on; 0: after each step. A restart trains
        the stored batches after the newest one again.
    keep_checkpoints
        The newest so many are kept.
    lora_rank, lora_alpha, lora_targets
        Train an adapter of this rank (0: all weights) on these modules.
    """

    model: str
    checkpoints: str
    lineage: str
    start: str = ""
    batches: str = ""
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    schedule: RateSchedule = "constant"
    schedule_steps: int = 1000
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    parts: int = 1
    passes: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.2
    importance_cap: float = 2.0
    ratio_limit: float = 0.0
    kl_coefficient: float = 0.0
    reference: str = ""
    normalisation: LengthNormalisation = "batch"
    constant_tokens: int = 1024
    loss: str = ""
    advantages: str = "mean-std"
    micro_batch_tokens: int = 8192
    packed: bool = True
    dtype: TrainingDtype = "auto"
    device: str = "auto"
    ranks: int = 1
    shares_gpus: bool = False
    threads: int | None = None
    seed: int = 0
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    silence_s: float = 600.0
    checkpoint_every_s: float = 1800.0
    keep_checkpoints: int = 2
    lora_rank: int = 0
    lora_alpha: float = 32.0
    lora_targets: str = "all-linear"

    def __post_init__(self) -> None:
        for name in ("model", "checkpoints", "lineage"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise BadInput(f"trainer {name} is {value!r}: give a text")
        for name in ("learning_rate", "max_grad_norm", "importance_cap", "adam_epsilon", "silence_s"):
            value = getattr(self, name)
            if not (is_finite(value) and value > 0):
                raise BadInput(f"trainer {name} is {value!r}: use a number above 0")
        for name in ("weight_decay", "clip_high", "kl_coefficient", "lora_alpha", "checkpoint_every_s"):
            value = getattr(self, name)
            if not (is_finite(value) and value >= 0):
                raise BadInput(f"trainer {name} is {value!r}: use a number of at least 0")
        for name in ("beta1", "beta2", "clip_low"):
            value = getattr(self, name)
            if not (is_finite(value) and 0 <= value < 1):
                raise BadInput(f"trainer {name} is {value!r}: use a number of at least 0 and below 1")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name == "threads":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise BadInput(f"trainer {name} is {value!r}: use a whole number of at least {least}")
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise BadInput(f"trainer {name} is {value!r}: use {', '.join(map(str, allowed))}")
        if not (is_finite(self.ratio_limit) and (self.ratio_limit == 0 or self.ratio_limit > 1)):
            raise BadInput(f"trainer ratio_limit is {self.ratio_limit!r}: use 0, or a number above 1")
        if self.loss and not all(self.loss.partition(":")[::2]):
            raise BadInput(f"trainer loss is {self.loss!r}: use package.module:function")

    def to_mapping(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> TrainerSpec:
        """Read a spec from parsed JSON or TOML.

        Raises
        ------
        BadInput
            A key is unknown or missing, or a value is impossible.
        """
        check_keys("trainer", mapping, [field.name for field in fields(cls)], required=3)
        return cls(**mapping)


_LEAST = {
    "warmup_steps": 0,
    "schedule_steps": 1,
    "parts": 1,
    "passes": 1,
    "constant_tokens": 1,
    "micro_batch_tokens": 1,
    "ranks": 1,
    "threads": 1,
    "seed": 0,
    "keep_checkpoints": 1,
    "lora_rank": 0,
}
_CHOICES = {
    "normalisation": get_args(LengthNormalisation),
    "schedule": get_args(RateSchedule),
    "dtype": get_args(TrainingDtype),
    "device": ("auto", "cpu", "cuda"),
    "packed": (True, False),
    "shares_gpus": (True, False),
    "gradient_checkpointing": ("auto", True, False),
}


_NOT_OF_LEARNING = frozenset(
    (
        *("model", "checkpoints", "lineage", "start", "batches"),
        *("micro_batch_tokens", "packed", "dtype", "device", "ranks", "shares_gpus", "threads"),
        *("gradient_checkpointing", "silence_s", "checkpoint_every_s", "keep_checkpoints"),
    )
)


def learning_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options by which a batch gives other weights, but for rounding; those that are not given have defaults."""
    known = {field.name: field.default for field in fields(TrainerSpec) if field.name not in _NOT_OF_LEARNING}
    return {name: given.get(name, default) for name, default in known.items()}


def checkpoint_name(version: PolicyVersion) -> str:
    return f"step-{version.number:06d}"
