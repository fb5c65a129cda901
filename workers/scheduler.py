"""The same as `heddle_dask.preload.scheduler`, which no package of a user's own hides."""

from __future__ import annotations

from heddle_dask.preload.scheduler import dask_setup

__all__ = ["dask_setup"]
