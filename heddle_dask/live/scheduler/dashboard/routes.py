"""Dask imports this module with its HTTP routes (`registration.register`): the moment to add the page.

With ``--no-dashboard`` nothing is imported, and Bokeh is not needed.
"""

from __future__ import annotations

from typing import Any

from heddle_dask.live.scheduler.dashboard.registration import add_to_coming_dashboard

routes: list[Any] = []

add_to_coming_dashboard()
