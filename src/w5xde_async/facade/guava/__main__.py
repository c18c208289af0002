"""``python -m w5xde_async.facade.guava``: the worker's program, by a shorter name."""

from __future__ import annotations

import sys

from w5xde_async.facade.guava.workers.network_worker import main

if __name__ == "__main__":
    sys.exit(main())
