"""Identifiers. Plain strings at run time, distinct types for the checker."""

from __future__ import annotations

from typing import NewType

TrajectoryId = NewType("TrajectoryId", str)
GroupId = NewType("GroupId", str)
EngineId = NewType("EngineId", str)
ActionId = NewType("ActionId", str)
HostId = NewType("HostId", str)
