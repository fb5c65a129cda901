"""The same as `heddle_dask.preload.model_worker`, which no package of a user's own hides."""

from __future__ import annotations

from heddle_dask.preload.model_worker import dask_setup

__all__ = ["dask_setup"]
