"""The service that owns a run: sessions, aggregator, checkpointer."""
