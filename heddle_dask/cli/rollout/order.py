"""The options of ``heddle rollout``, parsed and grouped by what they are about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.strategies.presets import Strategy

if TYPE_CHECKING:
    from heddle_dask.live.driver.files.run_writer import WriteMode

Group = TypeVar("Group")


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """What is rolled out. The scales are of a replayed trace; None: not given."""

    env: str
    tasks: int
    samples: int
    chat_template_kwargs: str | None
    reward: str | None
    token_scale: float | None
    tool_scale: float | None


@dataclass(frozen=True, slots=True)
class RolloutEngineOptions:
    """The engines: their kind (`engine`), how many (`engines`), and what each of them takes and costs."""

    model: str | None
    engine: str
    engines: int
    slots: int | None
    kv_transfer: bool
    tp_degrees: str | None
    cost: str | None
    dtype: str
    gpu_memory_utilization: float | None
    quantization: str | None
    logprobs: str | None
    engine_args: tuple[str, ...]
    hardware: str | None


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Where the rollout runs: the cluster behind `scheduler`, or a local one. Timeouts in seconds.

    `otel` is where its spans go.
    """

    scheduler: str | None
    tls_ca_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    cluster: Path | None
    tool_workers: int
    tool_cpus: int | None
    worker_timeout: float
    engine_timeout: float
    rejoin_timeout: float
    scheduler_timeout: float
    orphan_timeout: float
    dashboard: bool | None
    otel: str | None
    sandbox: str


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Limits of a trajectory and of the run (timeouts in seconds), and how tokens are sampled."""

    max_steps: int
    max_step_tokens: int | None
    max_context_tokens: int | None
    trajectory_timeout: float | None
    run_timeout: float | None
    tool_timeout: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seeded_sampling: bool


@dataclass(frozen=True, slots=True)
class RolloutOrder:
    """One rollout as ordered on the command line.

    Attributes
    ----------
    given
        Names of the options given on the command line itself, not by ``--config``, the settings or by default.
    by_default
        Names of the options that neither the command line, ``--config`` nor the settings give.
    """

    work: WorkOptions
    fleet: RolloutEngineOptions
    where: ClusterOptions
    limits: LimitOptions
    strategy: Strategy
    retries: RetryPolicy
    out: Path | None
    mode: WriteMode
    seed: int
    given: frozenset[str]
    by_default: frozenset[str]

    @classmethod
    def of(
        cls, options: Mapping[str, Any], mode: WriteMode, given: frozenset[str], by_default: frozenset[str]
    ) -> RolloutOrder:
        """Group the values of all options, by name."""
        return cls(
            _group(WorkOptions, options),
            _group(RolloutEngineOptions, options),
            _group(ClusterOptions, options),
            _group(LimitOptions, options),
            Strategy(options["strategy"], options["overrides"], options["weight"]),
            RetryPolicy.parse(options["retries"]),
            options["out"],
            mode,
            options["seed"],
            given,
            by_default,
        )


def _group(kind: type[Group], options: Mapping[str, Any]) -> Group:
    return kind(**{field.name: options[field.name] for field in fields(kind)})  # type: ignore[arg-type]
