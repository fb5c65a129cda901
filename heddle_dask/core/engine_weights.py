"""Which weights an engine has and is about to get, and which ones are published."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.core.run_description import WeightUpdatePolicy
from heddle_dask.core.transitions import WEIGHTS, WeightsEvent, WeightsState


@dataclass(slots=True, eq=False)
class WeightsOfEngine:
    """The weights of one engine.

    Attributes
    ----------
    installed
        The version that it samples with.
    target
        The version that it fetches, has fetched, installs, or could not get; None: nothing newer was published.
    failures
        Failed fetches and installations of `target`.
    waits_for_moves
        Whether its installation waits for a move of a context that uses the engine; no other move begins there.
    cause
        Why the latest fetch or installation failed; empty: it did not.
    """

    installed: PolicyVersion
    state: WeightsState = WeightsState.SETTLED
    target: PolicyVersion | None = None
    failures: int = 0
    waits_for_moves: bool = False
    cause: str = ""

    def advance(self, event: WeightsEvent) -> bool:
        """Apply `event`; False when the event is stale."""
        after = WEIGHTS.next_state(self.state, event, f"weights {self.installed} -> {self.target}")
        if after is None:
            return False
        self.state = after
        return True


@dataclass(slots=True, eq=False)
class PublishedWeights:
    """The weights that engines are to have.

    Attributes
    ----------
    published, uri
        The newest published version and its manifest; None: there is none.
    wanted
        The version to which engines are to go over, as soon as they have it or a newer one of its lineage; None: they
        keep what they have.
    policy
        Of the run that publishes.
    retired
        Lineages that another one has replaced: they do not come back.
    earlier
        The version published before `published`, and older ones that engines have: those that the weight store keeps,
        of the same lineage, oldest first, with their manifests.
    """

    published: PolicyVersion | None = None
    uri: str = ""
    wanted: PolicyVersion | None = None
    policy: WeightUpdatePolicy = field(default_factory=WeightUpdatePolicy)
    retired: dict[str, None] = field(default_factory=dict)
    earlier: dict[PolicyVersion, str] = field(default_factory=dict)

    def publish(
        self, version: PolicyVersion, uri: str, policy: WeightUpdatePolicy, in_use: Container[PolicyVersion]
    ) -> bool:
        """Take newer weights; False if these are not.

        Those of another lineage replace the others at once: what the old ones sample is of no use any more.
        """
        before = self.published
        if version.lineage in self.retired or not (before is None or version.is_newer_than(before)):
            return False
        if before is not None and before.lineage != version.lineage:
            self.retired[before.lineage] = None
            self.earlier = {}
        elif before is not None:
            self.earlier = {each: at for each, at in self.earlier.items() if each in in_use}
            self.earlier[before] = self.uri
        self.published, self.uri, self.policy = version, uri, policy
        foreign = self.wanted is not None and self.wanted.lineage != version.lineage
        if foreign or policy.install == "when-fetched":
            self.wanted = version
        return True

    def switch(self, version: PolicyVersion) -> bool:
        """Want engines to go over to this version or a newer one; False where they do so already."""
        if self.published is not None and self.published.lineage != version.lineage:
            return False
        if self.wanted is not None and not version.is_newer_than(self.wanted):
            return False
        self.wanted = version
        return True

    def uri_of(self, version: PolicyVersion) -> str:
        """The manifest of the newest version or of an earlier one."""
        return self.uri if version == self.published else self.earlier[version]

    def instead_of(self, target: PolicyVersion, installed: PolicyVersion) -> PolicyVersion | None:
        """The next older version than `target` that an engine with `installed` can load; None: there is none."""
        for version in reversed(self.earlier):
            if target.is_newer_than(version) and version.is_newer_than(installed):
                return version
        return None

    def is_behind(self, installed: PolicyVersion) -> bool:
        """Whether an engine with this version is to go over to a newer one."""
        return self.wanted is not None and self.wanted.is_newer_than(installed)

    def may_install(self, engine: WeightsOfEngine) -> bool:
        """Whether the engine has fetched what it is to go over to, something newer, or the best that it could get."""
        if engine.state is not WeightsState.FETCHED or engine.target is None or self.wanted is None:
            return False
        new_enough = engine.target != self.published or not self.wanted.is_newer_than(engine.target)
        return self.is_behind(engine.installed) and new_enough
