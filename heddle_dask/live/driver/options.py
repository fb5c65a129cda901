"""What a user chooses about a rollout: its limits, its sampling, its engines, and how long it waits.

Each field stands here once: its name, which is the key of its setting (`live.driver.settings`), its default, its
checks, and its option of the command line (`cli.field_options`). The command line imports this module at every start:
it loads neither Dask nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from heddle_dask.core.errors import BadInput, check_count, check_seconds, is_finite
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.sampling import check_sampling
from heddle_dask.engines.spec import DEFAULT_KIND, EngineOptions, EngineSpec, engine_kind
from heddle_dask.engines.vllm_command import DTYPES
from heddle_dask.live.driver.settings import configured, option

AskedDegrees = Literal["auto"] | Sequence[int] | None


@configured("budget", leave_out=("retries",))
@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one trajectory; what is not given comes from the settings ``heddle.budget``, if it is there.

    Attributes
    ----------
    max_steps
        LLM steps.
    max_step_tokens
        Generated tokens of one step, unless the program asks for another limit. None: what is left of the context.
    max_context_tokens
        Prompt and generated tokens together. None: as many as every engine takes. More than an engine takes is refused
        at the start.
    max_trajectory_s
        Wall-clock seconds from its admission; None: no limit. A trajectory that takes longer is truncated.
    tool_timeout_s
        Seconds of a tool call that sets no limit of its own (`Context.call`); None: no limit.
    max_run_s
        Wall-clock seconds of one `Rollout.run`, from the first submission; None: no limit. The run then ends as if it
        was interrupted, and can be resumed.
    max_action_bytes
        Limit of the arguments, and of the value, of one tool call, in bytes when pickled. A call that needs more fails.
    max_action_disk_bytes
        Limit of the scratch directory (``TMPDIR``) of one tool call in bytes, and of any file that it writes.
    max_action_processes
        Limit of the processes and threads of one tool call at a time.
    sandbox
        ``"strong"``, or ``"weak"`` to accept every sandbox of the tool workers (``docs/sandbox.md``).
    retries
        How often a step or an action is tried again.

    Raises
    ------
    BadInput
        A value is no number of its kind, or too small (context: below 2, other counts: below 1).
    """

    max_steps: int = option(512, "--max-steps", "count", "LLM steps per trajectory.", on_command_line=64)
    max_step_tokens: int | None = option(
        None, "--max-step-tokens", "count", "Tokens per step [default: what the context leaves]."
    )
    max_context_tokens: int | None = option(
        None,
        "--max-context-tokens",
        "tokens",
        "Prompt and generated tokens together [default: what the engines take; on CPUs at most 4096].",
    )
    max_trajectory_s: float | None = option(
        None, "--trajectory-timeout", "seconds", "Seconds; a longer one is truncated."
    )
    tool_timeout_s: float | None = option(600.0, "--tool-timeout", "seconds", "Seconds of one call.")
    max_run_s: float | None = option(None, "--run-timeout", "seconds", "Seconds; the run ends and can be resumed.")
    max_action_bytes: int = 64 << 20
    max_action_disk_bytes: int = 10 << 30
    max_action_processes: int = 1024
    sandbox: str = option("strong", "--sandbox", ("strong", "weak"), "weak: also accept a weak sandbox for tools.")
    retries: RetryPolicy = field(default_factory=RetryPolicy)

    @property
    def replayed(self) -> dict[str, int | None]:
        """The limits on which the steps of a program depend: a run can only be resumed with the same."""
        names = ("max_steps", "max_step_tokens", "max_context_tokens")
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        check_count("budget: max_steps", self.max_steps)
        if self.max_step_tokens is not None:
            check_count("budget: max_step_tokens", self.max_step_tokens)
        if self.max_context_tokens is not None:
            check_count("budget: max_context_tokens", self.max_context_tokens, least=2)
        check_count("budget: max_action_bytes", self.max_action_bytes)
        disk_bytes = self.max_action_disk_bytes
        if type(disk_bytes) is not int or disk_bytes < 1 << 20:
            raise BadInput(f"budget: max_action_disk_bytes is {disk_bytes!r}: use whole bytes, 1 MiB or more")
        check_count("budget: max_action_processes", self.max_action_processes)
        for name in ("max_trajectory_s", "tool_timeout_s", "max_run_s"):
            seconds = getattr(self, name)
            if seconds is not None and not (is_finite(seconds) and seconds > 0):
                raise BadInput(f"budget: {name} is {seconds!r}: use seconds above 0, or None")
        if self.sandbox not in ("strong", "weak"):
            raise BadInput(f"budget: sandbox is {self.sandbox!r}: use strong or weak")
        if not isinstance(self.retries, RetryPolicy):
            raise BadInput(f"budget: retries is {self.retries!r}: use RetryPolicy(…)")


@configured("sampling")
@dataclass(frozen=True, slots=True)
class Sampling:
    """How steps sample, unless the program says otherwise; settings: ``heddle.sampling``.

    Attributes
    ----------
    temperature
        0: greedy.
    top_p
        Tokens are drawn from the smallest set with this share of the probability.
    top_k
        Number of most likely tokens to draw from; 0: all.
    min_p
        Smallest probability of a token relative to that of the most likely one; 0: no limit.
    seeded
        True: each step has a seed of its own, which follows from the rollout's. On GPUs vLLM then samples request by
        request, without its fused sampler: slower. False: an engine draws from one generator, in the order in which
        steps happen to run. See ``docs/engines.md``.

    Raises
    ------
    BadInput
        The temperature is not finite or negative, top-p is not above 0 and at most 1, top-k is no whole number of at
        least 0, min-p is not from 0 to 1, or `seeded` is no bool.
    """

    temperature: float = option(1.0, "--temperature", "number")
    top_p: float = option(1.0, "--top-p", "share above 0")
    top_k: int = option(0, "--top-k", "whole", "0: all tokens.")
    min_p: float = option(0.0, "--min-p", "share", "0: no limit.")
    seeded: bool = option(
        False,
        "--seeded-sampling",
        "switch",
        "A seed for each step: tokens repeat better, GPUs sample slower.",
    )

    def __post_init__(self) -> None:
        check_sampling("sampling", self.temperature, self.top_p, self.top_k, self.min_p)
        if not isinstance(self.seeded, bool):
            raise BadInput(f"sampling: seeded is {self.seeded!r}: use True or False")


@configured("patience")
@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait; settings: ``heddle.patience``.

    Attributes
    ----------
    workers_s
        For workers with the right resource tags to join.
    engines_s
        For engines to answer, once their workers are there.
    others_s
        For the other engines to answer, once the first one does; then the run begins, and they join as they answer.
    rejoin_s
        For an engine or a tool worker to come back, when a run has lost the last one and work waits for it.
    scheduler_s
        For the scheduler to answer.
    silence_s
        For a worker to answer; then it is lost, and its work goes on elsewhere.
    orphans_s
        For a resumed run to take over the engines of a driver that has died; then they end.

    Raises
    ------
    BadInput
        A value is no finite number above 0.
    """

    workers_s: float = option(30.0, "--worker-timeout", "seconds", "Seconds.")
    engines_s: float = option(600.0, "--engine-timeout", "seconds", "Seconds.")
    others_s: float = option(
        10.0, "--others-timeout", "seconds", "Seconds for the other engines once one answers; then the run begins."
    )
    rejoin_s: float = option(
        600.0,
        "--rejoin-timeout",
        "seconds",
        "Seconds without any engine or tool worker, after which the run ends and can be resumed.",
    )
    scheduler_s: float = option(
        60.0,
        "--scheduler-timeout",
        "seconds",
        "Seconds without an answer, after which the run ends and can be resumed.",
    )
    silence_s: float = option(
        60.0, "--silence-timeout", "seconds", "Seconds without an answer, after which a worker is lost."
    )
    orphans_s: float = option(
        60.0,
        "--orphan-timeout",
        "seconds",
        "Seconds that engines on a standing cluster are kept for --resume when this process is killed.",
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            check_seconds(f"patience: {each.name}", getattr(self, each.name))


@configured("engines", leave_out=("tp_degrees", "cost", "spec", "patience"), instead="spec")
@dataclass(frozen=True, slots=True)
class Engines:
    """The LLM engines of a rollout; settings: ``heddle.engines`` (`kind`, `count`, `slots`, `kv_transfer`, `dtype`, …).

    Attributes
    ----------
    kind
        ``"vllm"`` (the default), ``"emulated"``, or ``"package.module:object"`` for a kind of another package.
    count
        How many engines must answer before a run starts. None: one on every worker tagged ``ENGINE``. With
        `tp_degrees`: how many workers that can host an engine must be there.
    slots
        Most sequences in one batch of an engine; None: as `EngineSpec`. With `tp_degrees`: of an engine of TP degree 1,
        or of the degree of `spec`; engines of other degrees have proportionally more or fewer.
    kv_transfer
        Whether engines transfer KV caches to one another.
    tp_degrees
        GPUs of each engine. None: every worker hosts an engine as `kind` or `spec` says. A list, such as
        ``[2, 1, 1]``: these, on the GPUs that the workers of each node share. ``"auto"``: before each batch, those
        under which it is expected to end earliest. See ``docs/degrees.md``.
    engines_per_gpu
        Engines that share each GPU, with equal parts of its memory.
    dtype
        Type of the weights; ``"auto"``: as the model's configuration says.
    options
        Options that only this kind has, such as `VllmOptions`; None: their defaults.
    cost
        What one engine is believed to cost (a form of `cost.engine_cost.cost_from_mapping`), or that by TP degree
        (``{"1": …, "2": …}``); an emulated engine named by `kind` also takes that time. None: an emulated engine's own
        cost, else the profile that the strategies name.
    spec
        A whole engine in place of `kind`, `slots`, `kv_transfer`, `engines_per_gpu`, `dtype` and `options`. None: an
        engine of that kind, with the context and the seed of the rollout.
    patience
        Seconds to wait for workers and engines.

    Raises
    ------
    BadInput
        A value that no engine can have, or one that `spec` contradicts.
    """

    kind: str = option(DEFAULT_KIND, "--engine", "engine kind")
    count: int | None = option(None, "--engines", "count", "How many engines.", on_command_line=1)
    slots: int | None = option(
        None, "--slots", "count", "Most sequences per engine [default: vLLM's own on GPUs, 16 elsewhere]."
    )
    kv_transfer: bool = option(
        False,
        "--kv-transfer",
        "switch",
        "Engines transfer KV caches (uses a CPU core per CPU engine).",
    )
    engines_per_gpu: int = 1
    tp_degrees: AskedDegrees = None
    cost: Mapping[str, Any] | None = None
    dtype: str = option("auto", "--dtype", DTYPES, "Type of the weights.")
    options: EngineOptions | None = None
    spec: EngineSpec | None = None
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        if isinstance(self.kind, EngineSpec):
            raise BadInput("engines: kind is an EngineSpec: use Engines(spec=EngineSpec(…))")
        if self.spec is None:
            options_type = engine_kind(self.kind).options_type
            if self.options is not None and not isinstance(self.options, options_type):
                raise BadInput(f"engines: options is {self.options!r}: use {options_type.__name__}(…)")
        else:
            self._check_spec(self.spec)
        for name, value in (("count", self.count), ("slots", self.slots)):
            if value is not None:
                check_count(f"engines: {name}", value)
        if not isinstance(self.kv_transfer, bool):
            raise BadInput(f"engines: kv_transfer is {self.kv_transfer!r}: use True or False")
        check_count("engines: engines_per_gpu", self.engines_per_gpu)
        object.__setattr__(self, "tp_degrees", checked_degrees(self.tp_degrees))
        if self.tp_degrees is not None and self.engines_per_gpu > 1:
            raise BadInput("engines: engines_per_gpu and tp_degrees exclude each other: planned engines share no GPU")
        if self.cost is not None and not isinstance(self.cost, Mapping):
            raise BadInput(f"engines: cost is {self.cost!r}: use a mapping such as {{'profile': NAME}}")
        if not isinstance(self.patience, Patience):
            raise BadInput(f"engines: patience is {self.patience!r}: use Patience(workers_s=…, …)")

    def _check_spec(self, spec: EngineSpec) -> None:
        if not isinstance(spec, EngineSpec):
            raise BadInput(f"engines: spec is {spec!r}: use an EngineSpec")
        defaults = {each.name: each.default for each in fields(self)}
        for name in ("kind", "slots", "kv_transfer", "engines_per_gpu", "dtype", "options"):
            value = getattr(self, name)
            if value not in (defaults[name], getattr(spec, name)):
                raise BadInput(f"engines: {name} is {value!r}, in the spec {getattr(spec, name)!r}: set it in the spec")

    @classmethod
    def of(cls, engines: str | EngineSpec | Engines | None) -> Engines:
        """Engines named by their kind, described by one spec, or given in full; None: those of the settings.

        Raises
        ------
        BadInput
            None of these, or as the constructor.
        """
        if engines is None:
            return cls()
        if isinstance(engines, Engines):
            return engines
        if isinstance(engines, EngineSpec):
            return cls(spec=engines)
        if isinstance(engines, str):
            return cls(engines)
        raise BadInput(f"engines is {engines!r}: use a kind such as {DEFAULT_KIND!r}, an EngineSpec or Engines(…)")

    def spec_for(self, model: str, max_context_tokens: int | None, seed: int) -> EngineSpec:
        """Describe one engine for this model; a `spec` that was given stays as it is.

        Raises
        ------
        BadInput
            A value that an engine of this kind cannot have.
        """
        if self.spec is not None:
            return self.spec
        kind = engine_kind(self.kind)
        options = kind.options_for(self.cost) if self.options is None else self.options
        if self.options is not None and self.cost is not None:
            options = self.options.with_cost(self.cost)
        return EngineSpec(
            kind=self.kind,
            model=model,
            slots=self.slots,
            kv_transfer=self.kv_transfer,
            max_model_len=max_context_tokens,
            seed=seed,
            dtype=self.dtype,
            engines_per_gpu=self.engines_per_gpu,
            options=options,
        )


def checked_degrees(asked: AskedDegrees) -> Literal["auto"] | tuple[int, ...] | None:
    """What was asked for, or a refusal.

    Raises
    ------
    BadInput
        Neither ``"auto"`` nor whole numbers of at least 1.
    """
    if asked is None or asked == "auto":
        return asked
    listed = isinstance(asked, Sequence) and not isinstance(asked, str)
    if not listed or not asked or not all(type(degree) is int and degree >= 1 for degree in asked):
        raise BadInput(
            f"tp_degrees is {asked!r}: use 'auto' or a list of whole numbers of at least 1, such as [2, 1, 1]"
        )
    return tuple(degree for degree in asked if isinstance(degree, int))
