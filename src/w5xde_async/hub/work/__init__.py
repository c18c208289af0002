"""What they are given and what becomes of it: leases with their data, claims, verdicts."""
