"""``python -m benchmarks``: the measurements behind the numbers in README and docs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

import click

from heddle_dask.cli.one_line import OneLineGroup

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "actions": "commands.actions",
        "behaviour": "behaviour",
        "bursts": "bursts",
        "checkpoints": "checkpoints",
        "dashboard": "commands.dashboard",
        "decisions": "decisions",
        "fidelity": "commands.fidelity",
        "gateway": "gateway",
        "gpu": "commands.gpu",
        "gpu-fidelity": "gpu_fidelity",
        "live": "commands.live",
        "overhead": "overhead",
        "paper": "commands.paper",
        "passes": "commands.passes",
        "predictor": "commands.predictor",
        "learning": "commands.learning",
        "records": "run_files",
        "redundancy": "commands.redundancy",
        "report": "report",
        "rollart": "commands.rollart",
        "samples": "samples",
        "sandboxes": "sandboxes",
        "scale": "scale",
        "slurm": "commands.slurm",
        "soak": "commands.soak",
        "watched": "watched",
        "weights": "weights",
    }
)
"""The module of each command. Only that of the command that runs is imported: it counts in what is measured."""


class _Benchmarks(OneLineGroup):
    """Knows its commands by name, and imports them when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names."""
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name."""
        if cmd_name not in MODULES:
            # The line that refuses it names all others.
            self.commands = dict.fromkeys(MODULES, self)
            return None
        found: click.Command = getattr(import_module(f"benchmarks.{MODULES[cmd_name]}"), cmd_name.replace("-", "_"))
        return found


@click.group("benchmarks", cls=_Benchmarks)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure this installation on this machine."""
    import dask.config

    from benchmarks.code_digest import code_digest

    # A measurement does not depend on the settings of the user.
    ctx.with_resource(dask.config.set({"heddle": None}))
    # Compute the digest now: the files may change while the measurement runs.
    code_digest()
