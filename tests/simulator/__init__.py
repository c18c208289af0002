"""A whole cluster in one deterministic event loop: the real rooms, virtual time, seeded faults, checks by value.

``python -m tests.simulator --seeds 0:1000`` runs schedules; ``--seed 17 -v`` replays one with its trace; ``--planted``
shows that the checks notice planted bugs. ``world`` says which rooms are real and what stands in for the others.
"""
