"""Journal and checkpoints."""
