"""``heddle rollout``: its options. Those of limits, sampling, engines and waiting stand in `live.driver.options`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from heddle_dask.cli.engine_option import LOGPROBS, gpu_options, strategies_from_here
from heddle_dask.cli.field_options import Asked, ConfiguredCommand, field_options
from heddle_dask.cli.shared_options import COUNT, COUNT_OR_SET, NOT_NEGATIVE, POSITIVE, print_json, shared_options
from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.options import Budget, Engines, Patience, Sampling

_FILE = click.Path(path_type=Path)
_TLS = ("tls_ca_file", "tls_cert", "tls_key")
_MODES = ("append", "overwrite", "resume")
_TASKS_OF_NO_SIZE = 16


@click.command("rollout", cls=ConfiguredCommand)
@click.option(
    "--env",
    default="math",
    show_default=True,
    help="NAME, NAME:TIER, package.module:function, replay:TRACE (NAME or FILE) or a benchmark (docs/tasks.md), as "
    "prompts:FILE; several: NAME=WEIGHT,NAME=WEIGHT.",
)
@click.option(
    "--reward",
    default=None,
    help="package.module:function, FILE.py:function or URL, in place of the environment's reward (docs/rewards.md).",
)
@click.option(
    "--agent",
    default=None,
    help="In place of --env: an agent that runs as it is, NAME or FILE.toml, on the set of --tasks (docs/agents.md).",
)
@click.option(
    "--tasks",
    type=COUNT_OR_SET,
    default=16,
    show_default=True,
    help="Tasks to draw. With --agent a set of tasks (docs/tasks.md), which is attempted as a whole.",
)
@click.option("--samples", type=COUNT, default=4, show_default=True, help="Attempts per task.")
@click.option("--model", default=None, help="Model directory [default: the shipped tiny-agent].")
@field_options(Engines)
@click.option(
    "--tp",
    "--degrees",
    "tp_degrees",
    default=None,
    help="TP degrees: auto, or GPUs of each engine, such as 2,1,1; --engines are then workers of one GPU each.",
)
@click.option(
    "--hardware",
    default=None,
    help="Classes of the engines, such as H800=2,H20=3, for affinity (docs/affinity.md); adds up to --engines.",
)
@click.option(
    "--cost",
    default=None,
    help="Cost of an engine: a profile, a table of `heddle profile`, or a TOML file (docs/cost.md).",
)
@gpu_options
@LOGPROBS
@click.option("--strategy", default="sticky-forecast", show_default=True, help="Preset.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    callback=strategies_from_here,
    help="PART=NAME[,KEY=VALUE]...: replace a part of it.",
)
@click.option(
    "--weight",
    type=POSITIVE,
    default=1.0,
    show_default=True,
    help="Share of the cluster, relative to that of other rollouts on it (docs/several-runs.md).",
)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="RUN.zarr [default: in runs/].")
@click.option("--append", is_flag=True, help="Add the trajectories to the run at --out.")
@click.option("--overwrite", is_flag=True, help="Replace the run at --out.")
@click.option("--resume", is_flag=True, help="Finish the run at --out; more --samples add attempts.")
@click.option("--accept-changes", is_flag=True, help="Go on though weights, rewards or payloads of tasks have changed.")
@click.option("--scheduler", default=None, help="Address of a Dask scheduler [default: a local cluster].")
@click.option("--tls-ca-file", type=_FILE, default=None, help="PEM file, for --scheduler tls://HOST:PORT.")
@click.option("--tls-cert", type=_FILE, default=None, help="PEM file of this client's certificate.")
@click.option("--tls-key", type=_FILE, default=None, help="PEM file of this client's key.")
@click.option(
    "--cluster",
    type=click.Path(path_type=Path),
    default=None,
    help="TOML file: groups of workers on SLURM or here (docs/slurm.md), or the size of a local cluster.",
)
@click.option("--token-scale", type=POSITIVE, default=None, help="replay: scales lengths [default: 1].")
@click.option("--tool-scale", type=NOT_NEGATIVE, default=None, help="replay: scales tool time [default: 1].")
@field_options(Budget)
@field_options(Sampling)
@click.option(
    "--chat-template-kwargs",
    default=None,
    metavar="JSON",
    help="Variables of the chat template, such as '{\"enable_thinking\": false}'.",
)
@click.option(
    "--retries",
    multiple=True,
    help="KEY=NUMBER[,...]: max_losses, max_preemptions, max_step_attempts, max_action_attempts.",
)
@click.option("--tool-workers", type=COUNT, default=1, show_default=True, help="Of the local cluster.")
@click.option("--tool-cpus", type=COUNT, default=None, help="For tools [default: those of the machine].")
@field_options(Patience)
@click.option("--otel", default=None, metavar="URL", help="OpenTelemetry collector (OTLP over HTTP) for spans.")
@click.option("--dashboard/--no-dashboard", default=None, help="[default: where bokeh is installed]")
@shared_options
@click.pass_context
def rollout(ctx: click.Context, /, as_json: bool, **options: Any) -> None:
    """Roll agents out and store their trajectories."""
    options["mode"] = _mode(ctx, options)
    _agent_as_environment(ctx, options)
    one_cluster(ctx, options)
    from heddle_dask.cli.rollout.run import run_rollout

    outcome = run_rollout(Asked.of(ctx, options), to_stderr=as_json)
    if as_json:
        print_json(outcome.result)
    ctx.exit(outcome.exit_code)


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _mode(ctx: click.Context, options: dict[str, Any]) -> str:
    """How to open ``--out``; an option on the command line wins over one of a file."""
    asked = [name for name in _MODES if options.pop(name)]
    asked = [name for name in asked if _is_given(ctx, name)] or asked
    if len(asked) > 1:
        raise BadInput(f"--{' and --'.join(asked)} exclude each other: use one")
    if not asked:
        return "create"
    if options["out"] is None:
        raise BadInput(f"--{asked[0]} needs --out RUN.zarr")
    return asked[0]


def _agent_as_environment(ctx: click.Context, options: dict[str, Any]) -> None:
    """Make of an agent and its set of tasks an environment and a number of tasks."""
    agent, tasks = options.pop("agent"), options["tasks"]
    if agent is None:
        if isinstance(tasks, str):
            raise BadInput(f"--tasks {tasks}: use a number; a set of tasks is for --agent")
        return
    if _is_given(ctx, "env"):
        raise BadInput("--agent and --env exclude each other: use one")
    if not isinstance(tasks, str):
        raise BadInput("--agent needs --tasks DIR or NAME: the tasks that it is to solve (docs/tasks.md)")
    from heddle_dask.cli.engine_option import import_from_here
    from heddle_dask.environments.agent_tasks import load_agent_tasks

    import_from_here()
    options["env"] = f"agent:{agent}:{tasks}"
    options["tasks"] = load_agent_tasks(tasks).size or _TASKS_OF_NO_SIZE


def one_cluster(ctx: click.Context, options: dict[str, Any]) -> None:
    """Of a scheduler and a cluster file, the one on the command line wins."""
    if options["scheduler"] is None and any(options[name] is not None for name in _TLS):
        raise BadInput("--tls-ca-file, --tls-cert and --tls-key need --scheduler tls://HOST:PORT")
    if options["scheduler"] is None or options["cluster"] is None:
        return
    given = [name for name in ("scheduler", "cluster") if _is_given(ctx, name)]
    if len(given) != 1:
        raise BadInput("--scheduler and --cluster exclude each other: use one")
    options["cluster" if given == ["scheduler"] else "scheduler"] = None
