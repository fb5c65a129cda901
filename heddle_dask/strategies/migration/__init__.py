"""Whether a trajectory leaves its engine while a tool runs, where to, and which contexts travel first."""
