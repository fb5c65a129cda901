"""Options of the command line from the fields of classes, and the way back: the objects that the options describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from heddle_dask.cli.engine_option import engine_option
from heddle_dask.cli.shared_options import COUNT, NOT_NEGATIVE, POSITIVE, TOKENS, FiniteNumber, WholeNumber, in_order
from heddle_dask.live.driver.options import Budget, Engines, Patience, Sampling
from heddle_dask.live.driver.settings import Option, options_of, section_of

Value = TypeVar("Value")

_TYPES: dict[Any, click.ParamType] = {
    "count": COUNT,
    "tokens": TOKENS,
    "whole": WholeNumber(0),
    "seconds": POSITIVE,
    "number": NOT_NEGATIVE,
    "share": FiniteNumber(min=0, max=1),
    "share above 0": FiniteNumber(min=0, max=1, min_open=True),
}


def field_options(kind: type) -> Any:
    """A decorator that adds an option for each field of a class that has one, in the order of the fields."""
    return in_order([_click_option(option) for option in options_of(kind).values()])


def _click_option(option: Option) -> Any:
    if option.form == "engine kind":
        return engine_option(option.default)
    if option.form == "switch":
        return click.option(option.flag, is_flag=True, help=option.text)
    return click.option(
        option.flag,
        type=click.Choice(option.form) if isinstance(option.form, tuple) else _TYPES[option.form],
        default=option.default,
        show_default=None if option.default is None else True,
        help=option.text or None,
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """The values of a command's options, by name.

    Attributes
    ----------
    given
        Names of the options on the command line itself: not those of ``--config``, of the settings or by default.
    by_default
        Names of the options that neither the command line, ``--config`` nor the settings give.
    """

    values: Mapping[str, Any]
    given: frozenset[str]
    by_default: frozenset[str]

    @classmethod
    def of(cls, ctx: click.Context, options: Mapping[str, Any]) -> Asked:
        def named(source: ParameterSource) -> frozenset[str]:
            return frozenset(name for name in options if ctx.get_parameter_source(name) is source)

        return cls(options, named(ParameterSource.COMMANDLINE), named(ParameterSource.DEFAULT))

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def but(self, **values: Any) -> Asked:
        return replace(self, values={**self.values, **values})

    def object_of(self, kind: type[Value], **fields: Any) -> Value:
        """The object whose fields these options are; `fields` are given in their place, or have no option."""
        asked = {name: self.values[option.name] for name, option in options_of(kind).items()}
        return kind(**{**asked, **fields})


def settings_by_option() -> dict[str, tuple[str, str]]:
    """Section and name of the setting of each option that has one."""
    return {
        option.name: (section_of(kind), name)
        for kind in (Budget, Engines, Patience, Sampling)
        for name, option in options_of(kind).items()
    } | {"otel": ("otel", "endpoint")}


class ConfiguredCommand(click.Command):
    """A command whose options default to the settings; ``--config`` and the command line win over them."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        extra["default_map"] = {**_defaults(), **(extra.get("default_map") or {})}
        return super().make_context(info_name, args, parent, **extra)


def _defaults() -> dict[str, Any]:
    # Imported here: other commands do not pay for Dask.
    import dask.config

    if not dask.config.get("heddle", None):
        return {}
    from heddle_dask.live.driver.inputs.rollout_inputs import strategy_of
    from heddle_dask.live.driver.inputs.telemetry import Telemetry
    from heddle_dask.live.driver.settings import configured_strategy, settings_of

    # Each reads its section, and refuses what is wrong there.
    groups = {section_of(kind): kind() for kind in (Budget, Engines, Telemetry, Patience, Sampling)}
    strategy_of(None)
    defaults = {
        option: getattr(groups[section], name)
        for option, (section, name) in settings_by_option().items()
        if name in settings_of(section)
    }
    preset = configured_strategy()
    return defaults if preset is None else {**defaults, "strategy": preset}
