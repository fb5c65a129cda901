"""Settings of Dask's configuration as defaults of the options of ``heddle rollout``."""

from __future__ import annotations

from typing import Any

import click

# Section and name of the setting by the name of the option.
SETTINGS = {
    "engine": ("engines", "kind"),
    "engines": ("engines", "count"),
    "slots": ("engines", "slots"),
    "kv_transfer": ("engines", "kv_transfer"),
    "max_steps": ("budget", "max_steps"),
    "max_step_tokens": ("budget", "max_step_tokens"),
    "max_context_tokens": ("budget", "max_context_tokens"),
    "trajectory_timeout": ("budget", "max_trajectory_s"),
    "tool_timeout": ("budget", "tool_timeout_s"),
    "run_timeout": ("budget", "max_run_s"),
    "sandbox": ("budget", "sandbox"),
    "temperature": ("sampling", "temperature"),
    "top_p": ("sampling", "top_p"),
    "top_k": ("sampling", "top_k"),
    "min_p": ("sampling", "min_p"),
    "seeded_sampling": ("sampling", "seeded"),
    "worker_timeout": ("patience", "workers_s"),
    "engine_timeout": ("patience", "engines_s"),
    "rejoin_timeout": ("patience", "rejoin_s"),
    "scheduler_timeout": ("patience", "scheduler_s"),
    "orphan_timeout": ("patience", "orphans_s"),
    "otel": ("otel", "endpoint"),
}


class ConfiguredCommand(click.Command):
    """A command whose options default to the settings; ``--config`` and the command line win over them."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the options.

        Raises
        ------
        BadInput
            A setting is wrong; the message names its key.
        """
        extra["default_map"] = {**_defaults(), **(extra.get("default_map") or {})}
        return super().make_context(info_name, args, parent, **extra)


def _defaults() -> dict[str, Any]:
    # Imported here: other commands do not pay for Dask.
    import dask.config

    if not dask.config.get("heddle", None):
        return {}
    from heddle_dask.live.driver.connection.capacity import Patience
    from heddle_dask.live.driver.inputs.rollout_inputs import Engines, strategy_of
    from heddle_dask.live.driver.inputs.telemetry import Telemetry
    from heddle_dask.live.driver.programs.services import Budget, Sampling
    from heddle_dask.live.driver.settings import configured_strategy, settings_of

    groups = {
        "budget": Budget(),
        "engines": Engines(),
        "otel": Telemetry(),
        "patience": Patience(),
        "sampling": Sampling(),
    }
    strategy_of(None)  # checks it, as the constructors do theirs
    defaults = {
        option: getattr(groups[section], name)
        for option, (section, name) in SETTINGS.items()
        if name in settings_of(section)
    }
    preset = configured_strategy()
    return defaults if preset is None else {**defaults, "strategy": preset}
