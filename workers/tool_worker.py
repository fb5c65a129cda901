"""The same as `heddle_dask.preload.tool_worker`, which no package of a user's own hides."""

from heddle_dask.preload.tool_worker import dask_setup as dask_setup
