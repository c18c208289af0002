"""Rules that turn results into new parameters."""
