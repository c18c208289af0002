"""Flat parameters: layout, buckets, fingerprint, the reducer's accumulators."""
