"""Bucket <-> fewer bytes: codecs, error feedback, lossless lz4. ``registry.codec(name)`` makes one."""
