"""Clusters with groups of different workers: as SLURM jobs, as steps of an allocation, or on this machine."""
