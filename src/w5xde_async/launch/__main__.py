"""``python -m w5xde_async.launch``."""

from __future__ import annotations

import sys

from w5xde_async.launch.program import main

if __name__ == "__main__":
    sys.exit(main())
