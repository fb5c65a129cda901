"""The same as `heddle_dask.preload.scheduler`, which no package of a user's own hides."""

from heddle_dask.preload.scheduler import dask_setup as dask_setup
