"""A run on a job engine: Kubernetes, Slurm or Ray.

A worker needs no rank, no gang and no address but the coordinator's, so each engine gets its simplest object: workers
that it starts as machines are free, starts again where they end with anything but 0, and may have more or fewer of
while the run goes on. What is started stands in ``templates``.
"""
