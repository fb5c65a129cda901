"""An engine at another TP degree: its spec, and what it is believed to cost.

`slots` that a spec names scale with the TP degree: an engine of twice the GPUs has twice the memory and takes twice as
many sequences. A cost is known at a degree if it is given for that degree (``{"1": {…}, "2": {…}}``), or if its form
says how it changes with the degree (a profile, shapes of model and GPU).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import EngineCost, cost_from_mapping
from heddle_dask.engines.spec import EngineSpec, engine_kind
from heddle_dask.strategies.partition.work import WorkEngine

# What the search may choose from; a node has at most so many GPUs.
POWERS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class TpDegreeSpecs:
    spec: EngineSpec  # the engine as asked for, at its own TP degree
    # What it is believed to cost, in one of the forms of `cost_from_mapping`, or one of them by degree; None: an
    # emulated engine's own, of a real one nothing is known.
    cost: Mapping[str, Any] | None = None

    def at(self, degree: int, gpus: Iterable[str] = ()) -> EngineSpec:
        """The spec of an engine of `degree` on these GPUs.

        Raises
        ------
        BadInput
            The degree does not divide the model's heads, or an emulated engine's cost is not known there.
        """
        kind, options = engine_kind(self.spec.kind), self.spec.options
        kind.check_tp_degree(self.spec.model, degree)
        own = options.cost
        own = kind.default_cost if own is None else own
        if own is not None:
            options = options.with_cost(cost_at(own, degree, self.spec.tp_degree))
        slots = self.spec.slots
        if slots is not None:
            slots = max(1, slots * degree // self.spec.tp_degree)
        return replace(self.spec, tp_degree=degree, slots=slots, options=options, devices=tuple(gpus))

    def engine(self, degree: int) -> WorkEngine:
        """Believed cost, in real seconds, and slots of an engine of `degree`.

        Raises
        ------
        BadInput
            Its cost or its slots are not known, or its memory holds no whole context.
        """
        kind = engine_kind(self.spec.kind)
        spec = kind.completed(self.at(degree))
        believed = spec.options.cost if self.cost is None else cost_at(self.cost, degree, self.spec.tp_degree)
        if believed is None:
            raise BadInput(
                "tp_degrees 'auto' need to know what an engine costs: give a cost (a profile, a table that "
                "`heddle profile` wrote, shapes of model and GPU)"
            )
        if spec.slots is None:
            raise BadInput(
                "tp_degrees 'auto' need to know how many sequences an engine batches, and on GPUs vLLM decides that "
                "when it starts: give slots"
            )
        cost = kind.effective_cost(spec, cost_from_mapping(believed, degree))
        if spec.max_model_len is not None and cost.capacity_tokens < spec.max_model_len:
            raise BadInput(
                f"an engine of TP degree {degree} has KV memory for {cost.capacity_tokens} tokens, fewer than a "
                f"context of {spec.max_model_len}: use a larger degree or a shorter context"
            )
        return WorkEngine(cost, spec.slots)

    def engines(self) -> dict[int, WorkEngine]:
        """For each power of two at which one can be, cost and slots of an engine.

        Raises
        ------
        BadInput
            There is none; the reason is that of the spec's own degree.
        """
        found: dict[int, WorkEngine] = {}
        refusals: dict[int, BadInput] = {}
        for degree in dict.fromkeys((self.spec.tp_degree, *POWERS)):
            try:
                found[degree] = self.engine(degree)
            except BadInput as error:
                refusals[degree] = error
        if not found:
            raise refusals[self.spec.tp_degree]
        return {degree: found[degree] for degree in sorted(found) if degree in POWERS} or found

    def check(self, degrees: Literal["auto"] | Iterable[int]) -> None:
        """Refuse TP degrees that this model cannot run at, or ``"auto"`` without known costs.

        Raises
        ------
        BadInput
            As `at` for each of the degrees; as `engines` for ``"auto"``.
        """
        if degrees == "auto":
            self.engines()
            return
        for degree in dict.fromkeys(degrees):
            self.at(int(degree))

    def described(self, degrees: Iterable[int]) -> dict[str, Any] | None:
        """The cost as a run's store describes it: `of` at `tp_degree`, and by each of `degrees` where it is known."""
        cost = self.spec.options.cost if self.cost is None else self.cost
        if cost is None:
            return None
        known: dict[int, dict[str, Any]] = {}
        for degree in degrees:
            try:
                form = dict(cost_at(cost, degree, self.spec.tp_degree))
                told = cost_from_mapping(form, degree)
            except BadInput:
                continue  # an engine of that degree will be refused, or does not fit
            # In real seconds: tools and transfers are.
            scale = self.spec.options.time_scale
            known[degree] = told.scaled(scale).to_mapping() if scale != 1 else form
        own = self.spec.tp_degree
        if not known:
            return {"of": dict(cost), "tp_degree": own}
        at = own if own in known else min(known)
        return {"of": known[at], "tp_degree": at, "by_degree": {str(d): form for d, form in known.items()}}


def cost_at(cost: Mapping[str, Any], degree: int, known_degree: int) -> Mapping[str, Any]:
    """The form of `cost` that holds at `degree`; one that is not by degree holds at `known_degree` at least.

    Raises
    ------
    BadInput
        It is not known at that degree.
    """
    if _by_degree(cost):
        given: dict[str, Mapping[str, Any]] = {str(name): form for name, form in cost.items()}
        if str(degree) not in given:
            listed = ", ".join(given)
            raise BadInput(f"the cost of an engine of TP degree {degree} is not given, only of {listed}: add it")
        return given[str(degree)]
    if degree != known_degree and cost_from_mapping(cost, degree) == _or_none(cost, known_degree):
        # Terms, and seconds per token, say nothing of degrees: the same cost comes out for each.
        raise BadInput(
            f"the cost of an engine of TP degree {degree} is not known, only that of TP degree {known_degree}: give a "
            "profile or shapes of model and GPU as cost, or a cost for each degree"
        )
    return cost


def _or_none(cost: Mapping[str, Any], degree: int) -> EngineCost | None:
    try:
        return cost_from_mapping(cost, degree)
    except BadInput:
        return None  # the model does not fit at that degree


def _by_degree(cost: Mapping[str, Any]) -> bool:
    return bool(cost) and all(str(key).isdigit() for key in cost)
