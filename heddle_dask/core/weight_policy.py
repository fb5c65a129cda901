"""How engines go over to the weights that a run trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heddle_dask.core.errors import BadInput, is_finite

UpdateOrder = Literal["one-by-one", "all-at-once"]
InstallTime = Literal["on-switch", "when-fetched"]


@dataclass(frozen=True, slots=True)
class WeightUpdatePolicy:
    """When and in which order engines install fetched weights.

    Attributes
    ----------
    order
        ``"one-by-one"``: one engine installs at a time, and the others generate; ``"all-at-once"``: each installs as
        soon as it may.
    keep_kv
        Steps in flight and cached prefixes keep the KV computed under older weights; else it is recomputed.
    install
        ``"on-switch"``: when the training loop asks for it (`SwitchRequested`); ``"when-fetched"``: at once.
    max_fetches
        Failed fetches and installations of one version by one engine before it is left at its weights until a newer one
        is published.
    retry_s
        Seconds before the first repetition of a failed fetch; doubled for each further one, up to a minute.

    Raises
    ------
    BadInput
    """

    order: UpdateOrder = "one-by-one"
    keep_kv: bool = False
    install: InstallTime = "on-switch"
    max_fetches: int = 5
    retry_s: float = 1.0

    def __post_init__(self) -> None:
        if self.order not in ("one-by-one", "all-at-once"):
            raise BadInput(f"order of weight updates is {self.order!r}: use one-by-one or all-at-once")
        if self.install not in ("on-switch", "when-fetched"):
            raise BadInput(f"install of weights is {self.install!r}: use on-switch or when-fetched")
        if isinstance(self.max_fetches, bool) or self.max_fetches < 1:
            raise BadInput(f"max_fetches of weights is {self.max_fetches!r}: use at least 1")
        if not is_finite(self.retry_s) or self.retry_s < 0:
            raise BadInput(f"retry_s of weights is {self.retry_s!r}: use a finite number of at least 0")

    def backoff_s(self, failures: int) -> float:
        """Seconds between the failure of that number (from 1) and the next fetch."""
        return float(min(60.0, self.retry_s * 2 ** (failures - 1)))
