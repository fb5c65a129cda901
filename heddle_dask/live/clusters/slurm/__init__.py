"""A cluster of worker groups: jobs of SLURM, of one allocation, or of this machine."""
