"""Checkpoints and the run directory: atomic, hashed, no pickle."""
