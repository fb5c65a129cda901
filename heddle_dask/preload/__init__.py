"""Preloads of Dask: what makes a scheduler or a worker one of ours, as a module of each kind."""
