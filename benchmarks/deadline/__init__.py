"""Admission by a common deadline, the yardstick for what exact lengths are worth; it comes in as `ARM`."""

DEADLINE = "benchmarks.deadline.admission:Deadline"
ARM = f"heddle:admission={DEADLINE}"
"""Preset `heddle` with this admission, in the form of `heddle_dask.sim.rollout.Arm.parse`."""
EXACT = f"{ARM}:predictor=oracle"
"""The same with exact lengths."""
