"""Presets: named sets of strategies, and the replacement of their parts.

A strategy's dataclass fields are its options: there is no other schema.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.core.notebook import facts_html, rows_html
from heddle_dask.core.run_description import check_weight
from heddle_dask.core.view import PredictorChoice, StrategySet
from heddle_dask.cost.engine_cost import ClassCosts, EngineCost, cost_from_mapping
from heddle_dask.strategies.actions.elastic import ElasticUnits
from heddle_dask.strategies.actions.first_come import FirstComeMinimum
from heddle_dask.strategies.admission.additive_increase import AdditiveIncrease
from heddle_dask.strategies.admission.at_most import AtMost, Unlimited
from heddle_dask.strategies.admission.kv_fit import KvFit
from heddle_dask.strategies.admission.kv_forecast import KvForecast
from heddle_dask.strategies.affinity.hardware_map import DEFAULT, HardwareMap, affinity_override, keys_of
from heddle_dask.strategies.affinity.prefill_decode import PrefillDecode
from heddle_dask.strategies.affinity.priced import PricedAffinity
from heddle_dask.strategies.engine_costs import UsesCosts
from heddle_dask.strategies.imported import imported_strategy, is_imported
from heddle_dask.strategies.migration.priced import Priced
from heddle_dask.strategies.migration.rank_rule import RankRule
from heddle_dask.strategies.placement.cache_aware import CacheAware
from heddle_dask.strategies.placement.least_load import LeastLoad
from heddle_dask.strategies.placement.presorted import PresortedPlan
from heddle_dask.strategies.placement.round_robin import RoundRobin
from heddle_dask.strategies.placement.sticky import Sticky, StickyByCount, StickyLeastLoaded
from heddle_dask.strategies.predictor import LearnedPredictorOptions, OracleOptions
from heddle_dask.strategies.preemption import Hysteresis
from heddle_dask.strategies.scheduling import FirstComeFirstServed, GroupFirst, LeastAttained, LongestFirst
from heddle_dask.strategies.stealing import PricedStealing


@dataclass(frozen=True, slots=True)
class NoPart:
    """A part that is switched off."""


PARTS: Mapping[str, Mapping[str, type]] = {
    "placement": {
        "round-robin": RoundRobin,
        "least-load": LeastLoad,
        "sticky": Sticky,
        "sticky-by-count": StickyByCount,
        "sticky-least-loaded": StickyLeastLoaded,
        "cache-aware": CacheAware,
        "presorted": PresortedPlan,
    },
    "scheduling": {
        "fcfs": FirstComeFirstServed,
        "longest-first": LongestFirst,
        "least-attained": LeastAttained,
        "group-first": GroupFirst,
    },
    "preemption": {"none": NoPart, "hysteresis": Hysteresis},
    "migration": {"none": NoPart, "priced": Priced, "rank-rule": RankRule},
    "admission": {
        "unlimited": Unlimited,
        "at-most": AtMost,
        "additive-increase": AdditiveIncrease,
        "kv-fit": KvFit,
        "kv-forecast": KvForecast,
    },
    "affinity": {
        "none": NoPart,
        "map": HardwareMap,
        "priced": PricedAffinity,
        "prefill-decode": PrefillDecode,
    },
    "stealing": {"none": NoPart, "priced": PricedStealing},
    "predictor": {"none": NoPart, "xgboost": LearnedPredictorOptions, "oracle": OracleOptions},
    "actions": {"fcfs-minimum": FirstComeMinimum, "elastic": ElasticUnits},
}

_PLAIN = {
    "scheduling": "fcfs",
    "preemption": "none",
    "migration": "none",
    "admission": "unlimited",
    "affinity": "none",
    "stealing": "priced",
    "predictor": "none",
    "actions": "elastic",
}
# Placements of other frameworks and routers, each with the scheduling of the original.
_BASELINES = {
    **{name: name for name in ("least-load", "sticky", "sticky-least-loaded", "cache-aware")},
    "verl": "sticky-by-count",
    "verl-hybrid": "cache-aware,skew_steps=32,skew_ratio=1.0",
}
PRESETS: Mapping[str, Mapping[str, str]] = {
    **{name: {"placement": placement, **_PLAIN} for name, placement in _BASELINES.items()},
    # 512 is the default of slime's --sglang-server-concurrency.
    "slime": {**_PLAIN, "placement": "least-load,of=steps", "admission": "at-most,per_engine=512"},
    "autellix": {
        **_PLAIN,
        "placement": "sticky-least-loaded",
        "scheduling": "least-attained",
        "preemption": "hysteresis,least_wait_tokens=0",  # a higher queue always goes before a lower one
    },
    "sticky-forecast": {"placement": "sticky-least-loaded", **_PLAIN, "admission": "kv-forecast"},
    "heddle": {
        **_PLAIN,
        "placement": "sticky-least-loaded",
        "scheduling": "longest-first",
        "preemption": "hysteresis",
        "migration": "priced",
        "admission": "kv-fit",
        "predictor": "xgboost",
    },
    "heddle-paper": {
        **_PLAIN,
        "placement": "presorted",
        "scheduling": "longest-first,of=remaining,quantile=median,tools=False",
        "preemption": "hysteresis,ratio=1.0,margin_tokens=0,least_wait_tokens=0",
        "migration": "rank-rule",
        "predictor": "xgboost",
    },
}


DEFAULT_PRESET = "sticky-forecast"
"""The best measured that needs no training data (experiments.md, admission without parameters)."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A preset, with parts of it replaced.

    Attributes
    ----------
    preset
        Name of a preset [default: ``"sticky-forecast"``].
    overrides
        ``part=name[,option=value]…``, for example ``admission=at-most,alive=64`` [default: none]. A name may be
        ``package.module:Class``: a dataclass of yours, which driver and scheduler can import.
    weight
        Share of the cluster's engines and pools, relative to that of other rollouts that run there [default: 1].

    Raises
    ------
    BadInput
        As `build_strategies`, overrides that are no sequence of texts, and a weight that is no number above 0.
    """

    preset: str = DEFAULT_PRESET
    overrides: Sequence[str] = ()
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.preset, str):
            raise BadInput(f"strategy is {self.preset!r}: use the name of a preset or Strategy(…)")
        given = self.overrides
        listed = isinstance(given, Sequence) and not isinstance(given, str)
        if not listed or not all(isinstance(text, str) for text in given):
            raise BadInput(f"strategy overrides are {given!r}: use a list such as ['scheduling=fcfs']")
        object.__setattr__(self, "overrides", tuple(self.overrides))
        check_weight("strategy weight", self.weight)
        self.build(seed=0)

    @classmethod
    def of(cls, strategy: str | Strategy) -> Strategy:
        """A preset by its name, or a strategy as it is.

        Raises
        ------
        BadInput
            As the constructor.
        """
        return strategy if isinstance(strategy, Strategy) else cls(strategy)

    def build(self, *, seed: int) -> StrategySet:
        """Build its strategies, as `build_strategies`."""
        return build_strategies(self.preset, seed=seed, overrides=self.overrides)

    def among(self, domains: Collection[str]) -> Strategy:
        """The same for a part of a mix: without the names of an affinity map that cover none of these domains."""
        covering = {DEFAULT, *(key for domain in domains for key in keys_of(domain))}
        kept = []
        for text in self.overrides:
            part, name, options = _parse_override(text)
            if PARTS[part].get(name) is HardwareMap:
                options = {key: str(value) for key, value in options.items() if key in covering}
                text = affinity_override(options) if options else f"{part}=none"
            kept.append(text)
        return replace(self, overrides=kept)

    def _repr_html_(self) -> str:
        """What a notebook shows: the strategy of each part, and which of them are not the preset's."""
        chosen = {part: (choice, "") for part, choice in PRESETS[self.preset].items()}
        for text in self.overrides:
            part, _, choice = text.partition("=")
            chosen[part] = choice, "replaced"
        rows = ((part, choice, changed) for part, (choice, changed) in chosen.items())
        return facts_html(f"Strategy {self.preset}", {}, rows_html(("part", "strategy", ""), rows))

    @property
    def knows_lengths(self) -> bool:
        """Whether its predictor is an exact oracle, so that all lengths are known."""
        return is_exact(self.build(seed=0).predictor)


def tell_costs(strategies: StrategySet, known: Mapping[int, EngineCost]) -> None:
    """Set the costs by TP degree of every strategy that plans with costs; call it before the first event."""
    parts = (strategies.placement, strategies.scheduling, strategies.migration, strategies.admission)
    for part in (*parts, strategies.actions, strategies.affinity, strategies.stealing):
        if isinstance(part, UsesCosts):
            part.use_costs(known)


def is_exact(choice: PredictorChoice | None) -> bool:
    return choice is not None and choice.name == "oracle" and choice.options["error_factor"] == 1


def strategies_of_run(described: Mapping[str, Any]) -> StrategySet:
    """The strategies of a live run from the metadata of its store, for a replay of its journal.

    Parameters
    ----------
    described
        `strategy`, `overrides`, `seed`; and `cost`, with which they planned: the cost of one engine (`of`, at
        `tp_degree`), those of other TP degrees (`by_degree`) and of classes of hardware (`by_class`), or None.

    Raises
    ------
    BadInput
        Unknown preset, part, name or option, or an impossible cost.
    """
    overrides = tuple(described["overrides"])
    strategies = build_strategies(described["strategy"], seed=described["seed"], overrides=overrides)
    cost = described.get("cost")
    if cost is not None:
        forms = {int(degree): form for degree, form in cost.get("by_degree", {}).items()}
        forms.setdefault(cost["tp_degree"], cost["of"])
        known = {degree: cost_from_mapping(form, degree) for degree, form in forms.items()}
        classes = cost.get("by_class", {})
        if classes:
            known = ClassCosts(
                {(name, degree): cost_from_mapping(form, degree) for name, form in classes.items() for degree in known}
            )
        tell_costs(strategies, known)
    return strategies


def build_strategies(preset: str, *, seed: int = 0, overrides: Sequence[str] = ()) -> StrategySet:
    """Build the strategies of a preset.

    Parameters
    ----------
    seed
        Seed of every strategy with random choices (ties).
    overrides
        ``part=name[,option=value]…``, for example ``admission=at-most,alive=64``; a name may be
        ``package.module:Class``.

    Raises
    ------
    BadInput
        Unknown preset, part, name or option; the message lists what is allowed.
    """
    if preset not in PRESETS:
        raise BadInput(f"unknown strategy '{preset}'; choose one of: {', '.join(PRESETS)}")
    chosen: dict[str, tuple[str, dict[str, Any]]] = {}
    for text in (*(f"{part}={choice}" for part, choice in PRESETS[preset].items()), *overrides):
        part, name, options = _parse_override(text)
        chosen[part] = (name, options)
    name, options = chosen.pop("predictor")
    parts: dict[str, Any] = {}
    # A migration may take other parts as arguments.
    for part in sorted(chosen, key=lambda part: part == "migration"):
        parts[part] = _build(part, *chosen[part], seed, parts)
    return StrategySet(**parts, predictor=_predictor_choice(name, options, seed))


def _parts_for(kind: type, built: Mapping[str, Any]) -> dict[str, Any]:
    """Other parts of the preset for this strategy: its fields that name a part in their metadata, if the type fits."""
    wanted = {f.name: f.metadata for f in fields(kind) if "part" in f.metadata}
    found = {name: (built.get(asked["part"]), asked["kind"]) for name, asked in wanted.items()}
    return {name: part for name, (part, of) in found.items() if isinstance(part, of)}


def _predictor_choice(name: str, options: dict[str, Any], seed: int) -> PredictorChoice | None:
    built = _build("predictor", name, options, seed)
    return None if built is None else PredictorChoice(name, asdict(built))


def _parse_override(text: str) -> tuple[str, str, dict[str, Any]]:
    head, *rest = text.split(",")
    part, _, name = head.partition("=")
    if part not in PARTS:
        raise BadInput(f"strategy override '{text}': unknown part '{part}'; choose one of: {', '.join(PARTS)}")
    if name not in PARTS[part] and not is_imported(name):
        raise BadInput(f"strategy override '{text}': unknown {part} '{name}'; choose one of: {', '.join(PARTS[part])}")
    options: dict[str, Any] = {}
    for pair in rest:
        key, equals, value = pair.partition("=")
        if not equals:
            raise BadInput(f"strategy override '{text}': '{pair}' is not of the form option=value")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return part, name, options


def _build(part: str, name: str, options: dict[str, Any], seed: int, built: Mapping[str, Any] | None = None) -> Any:
    kind = imported_strategy(part, name) if is_imported(name) else PARTS[part][name]
    if kind is HardwareMap:  # its options are domains
        return HardwareMap.from_options(options)
    allowed = {f.name: f for f in fields(kind) if f.init and not f.name.startswith("_") and not f.metadata}
    for key in options:
        if key not in allowed:
            listed = ", ".join(allowed) or "none"
            raise BadInput(f"{part} '{name}' has no option '{key}'; its options: {listed}")
    for key, option in allowed.items():
        if key not in options and option.default is MISSING and option.default_factory is MISSING:
            raise BadInput(f"{part} '{name}' needs the option '{key}': {part}={name},{key}=…")
    if "seed" in allowed:
        options = {"seed": seed, **options}
        if not isinstance(options["seed"], int):  # None would seed from the system and prevent a replay
            raise BadInput(f"{part} '{name}': seed is {options['seed']!r}; it must be a whole number")
    try:
        strategy = kind(**options, **_parts_for(kind, built or {}))
    except BadInput:
        raise
    except (TypeError, ValueError) as error:
        raise BadInput(f"{part} '{name}': {error}") from error
    return None if kind is NoPart else strategy
