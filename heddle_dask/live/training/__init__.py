"""The training loop on a live cluster: carries out what `heddle_dask.training.loop` wants done."""
