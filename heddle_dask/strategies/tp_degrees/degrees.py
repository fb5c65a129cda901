"""The values of the search over TP degrees: the available GPUs, a state, the running engines, the settings.

A state is a tuple of counts of engines, one for each allowed degree from the largest to the smallest. Degrees divide
one another (1, 2, 4, 8), so an engine splits into whole smaller ones, and any mix fits a node if its GPUs suffice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from heddle_dask.core.errors import BadInput
from heddle_dask.strategies.partition.work import WorkPlan

State = tuple[int, ...]


def allowed_degrees(attention_heads: int, gpus_per_node: int) -> tuple[int, ...]:
    """The powers of two that divide the attention heads and fit a node, from the largest to the smallest."""
    if attention_heads < 1 or gpus_per_node < 1:
        raise BadInput(f"{attention_heads} heads on nodes of {gpus_per_node} GPUs: use at least 1 of each")
    powers = [1 << exponent for exponent in range(gpus_per_node.bit_length())]
    return tuple(d for d in reversed(powers) if d <= gpus_per_node and attention_heads % d == 0)


@dataclass(frozen=True, slots=True)
class AvailableGpus:
    """GPUs for engines, and the TP degrees that an engine may have.

    Attributes
    ----------
    gpus
        All GPUs; the last node has the remainder.
    gpus_per_node
        GPUs of a node; an engine is inside one node.
    tp_degrees
        Allowed degrees; kept from the largest to the smallest. Each must divide the next larger one.
    """

    gpus: int
    gpus_per_node: int = 8
    tp_degrees: tuple[int, ...] = (8, 4, 2, 1)

    def __post_init__(self) -> None:
        ordered = tuple(sorted(set(self.tp_degrees), reverse=True))
        object.__setattr__(self, "tp_degrees", ordered)
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise BadInput(f"{self.gpus} GPUs in nodes of {self.gpus_per_node}: use at least 1 of each")
        if not ordered or ordered[-1] < 1:
            raise BadInput(f"degrees {ordered}: use at least one, and none below 1")
        for larger, smaller in pairwise(ordered):
            if larger % smaller:
                raise BadInput(f"degrees {smaller} and {larger}: each must divide the next larger one")
        if not self.usable(ordered[-1]):
            raise BadInput(
                f"degree {ordered[-1]} does not fit {self.gpus} GPUs in nodes of {self.gpus_per_node}: "
                "allow a smaller degree or give more GPUs"
            )

    def usable(self, degree: int) -> int:
        """GPUs that engines of at least `degree` can use in total without spanning nodes."""
        whole, rest = divmod(self.gpus, self.gpus_per_node)
        return degree * (whole * (self.gpus_per_node // degree) + rest // degree)

    def fits(self, state: State) -> bool:
        """Whether the engines of `state` fit on the nodes.

        Exact, since degrees divide one another: engines of at least d fill nodes in units of d.
        """
        taken = 0
        for degree, count in zip(self.tp_degrees, state, strict=True):
            taken += degree * count
            if count and taken > self.usable(degree):
                return False
        return min(state) >= 0

    def uniform(self) -> Iterator[tuple[int, State]]:
        """For each degree that fits, the state with as many such engines as possible."""
        for at, degree in enumerate(self.tp_degrees):
            count = self.usable(degree) // degree
            if count:
                yield degree, tuple(count if j == at else 0 for j in range(len(self.tp_degrees)))

    def state_of(self, degrees: Sequence[int]) -> State:
        """Count engines by degree; degrees that are not allowed are left out."""
        return tuple(sum(d == degree for d in degrees) for degree in self.tp_degrees)

    def degrees_of(self, state: State) -> tuple[int, ...]:
        """The degrees of all engines, from the largest to the smallest."""
        return tuple(d for d, count in zip(self.tp_degrees, state, strict=True) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Running:
    """The engines that run now.

    Attributes
    ----------
    tp_degrees
        TP degrees of all running engines.
    restart_s
        For each degree, seconds until a new engine of it is ready (start or reshard).
    """

    tp_degrees: tuple[int, ...]
    restart_s: Mapping[int, float]

    def price_s(self, degrees: Sequence[int]) -> float:
        """Seconds until engines of `degrees` are ready.

        Unchanged engines cost nothing; the others start concurrently, so the slowest counts.
        """
        return max((self.restart_s[d] for d in self.growing(degrees)), default=0.0)

    def growing(self, degrees: Sequence[int]) -> list[int]:
        """Degrees with more wanted than running engines."""
        wanted = dict.fromkeys(degrees)
        return [d for d in wanted if degrees.count(d) > self.tp_degrees.count(d)]


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Effort and precision of the search.

    Attributes
    ----------
    moves
        Moves of the annealing walk; a move to a state that was tried before counts too.
    first_temperature
        First temperature of the annealing, as a share of the seconds of its start. The paper begins at 1 (Algorithm
        2), where nearly every move is accepted; all uniform states are starts here, so less is enough.
    last_temperature
        Last temperature, as a share; cooling is geometric.
    grid
        Seconds are compared on a geometric grid of this ratio: makespans within one step count as equal.
    finalists
        Number of states that are scored with the true placement, besides the uniform ones and the running one.
    mix_gain
        A mix of TP degrees is chosen only if its estimated makespan is this share below that of the best uniform
        degree and of the running engines. In simulation, mixes were up to 9 % worse against uniform degrees than
        estimated (`docs/results.md`).
    """

    moves: int = 400
    first_temperature: float = 0.2
    last_temperature: float = 0.002
    grid: float = 1.002
    finalists: int = 2
    mix_gain: float = 0.1

    def __post_init__(self) -> None:
        if self.moves < 0 or self.finalists < 1:
            raise BadInput(f"{self.moves} moves and {self.finalists} finalists: use at least 0 and 1")
        if not 0 <= self.mix_gain < 1:
            raise BadInput(f"mix_gain {self.mix_gain}: use a share from 0 to below 1")
        if not 0 < self.last_temperature <= self.first_temperature:
            raise BadInput(
                f"temperatures {self.first_temperature} to {self.last_temperature}: use a falling pair above 0"
            )
        if not 1 < self.grid <= 2:
            raise BadInput(f"grid {self.grid}: use a ratio above 1 and at most 2")


@dataclass(frozen=True, slots=True)
class DegreeChoice:
    """Result of the search.

    Attributes
    ----------
    tp_degrees
        TP degrees of the engines, from the largest to the smallest.
    seconds
        Makespan of `plan`, including the seconds until the engines are ready.
    uniform
        For each degree that fits, `seconds` of the maximum number of such engines; infinite if some trajectory's
        context fits another degree only.
    price_s
        The part of `seconds` until the engines are ready.
    plan
        Which engine (a position in `tp_degrees`) takes each trajectory.
    tried
        Number of different states that the search scored.
    """

    tp_degrees: tuple[int, ...]
    seconds: float
    uniform: Mapping[int, float]
    price_s: float
    plan: WorkPlan = field(repr=False)
    tried: int
