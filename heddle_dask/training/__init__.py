"""What a trainer takes: groups of trajectories, the sample buffer, batches. Pure: no Dask, no torch."""
