"""What workers are given and what becomes of it: leases with their data, the slots of their results, verdicts."""
