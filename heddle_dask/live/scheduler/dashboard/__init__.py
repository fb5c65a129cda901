"""The page of rollouts in the Dask dashboard: a tab, and one panel per view for JupyterLab."""
