"""Where Guava had its worker: ``python -m w5xde_async.facade.guava.workers.network_worker``."""
