"""What the product is compared with and does not offer, by the door of users: ``package.module:Class``."""

FIXED = "benchmarks.opponents.fixed_units:FixedUnits"
PER_TRAJECTORY = "benchmarks.opponents.per_trajectory:PerTrajectory"
WORKER_POOLS = "benchmarks.opponents.worker_pools:WorkerPools"
