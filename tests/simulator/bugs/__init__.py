"""Planted bugs: defects put into the real rooms at run time, to see that the simulator notices each.

A bug replaces methods by name for the time of one run; nothing of it stays. ``docs/planted-bugs.md`` says which seed
caught which.
"""

from tests.simulator.bugs import islands, steps, storage
from tests.simulator.bugs.registry import BUGS, Bug, planted

__all__ = ["BUGS", "Bug", "islands", "planted", "steps", "storage"]
