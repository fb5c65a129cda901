"""The engine kinds of this package, each in one file; `heddle_dask.engines.spec` names them."""
