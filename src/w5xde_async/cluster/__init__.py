"""A coordinator and its workers on one machine, as processes or in one."""

from w5xde_async.cluster.local_cluster import LocalCluster

__all__ = ["LocalCluster"]
