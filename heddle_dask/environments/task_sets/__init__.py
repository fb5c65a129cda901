"""Tasks in the forms in which benchmarks are published."""
