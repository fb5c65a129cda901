"""What the product is compared with and does not offer, by the door of users: ``package.module:Class``."""

FIXED = "benchmarks.opponents.fixed_units:FixedUnits"
LEAST_WORK = "benchmarks.opponents.least_work:LeastWork"
PAPER = "benchmarks.opponents.paper_units:PaperUnits"
PER_TRAJECTORY = "benchmarks.opponents.per_trajectory:PerTrajectory"
WORKER_POOLS = "benchmarks.opponents.worker_pools:WorkerPools"
