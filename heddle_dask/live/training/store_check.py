"""Refuses a weight store that has the weights of another training."""

from __future__ import annotations

from collections.abc import Collection

from heddle_dask.core.errors import BadInput
from heddle_dask.weights.store import WeightStore


def check_store(store: WeightStore, own: Collection[str]) -> None:
    """Engines of this training would not take them, but two trainings must not prune one another's versions.

    Parameters
    ----------
    own
        Lineages of this training.

    Raises
    ------
    BadInput
        The store holds another lineage.
    """
    foreign = sorted(set(store.lineages()) - set(own))
    if foreign:
        raise BadInput(
            f"the weight store {store.uri} holds weights of another training ({foreign[0]}): give another --store, or "
            "go on with that training by --resume"
        )
