"""Migration: whether and where a trajectory moves during a tool call, and the order of transfers."""
