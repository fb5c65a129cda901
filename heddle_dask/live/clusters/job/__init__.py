"""A job of a batch system that hosts workers: what it starts, when it ends, and how it leaves.

`workers/job.py` is the program. It stays beside its workers until the end of the job, takes the signals of the batch
system in their place, and has the scheduler drain them in time.
"""
