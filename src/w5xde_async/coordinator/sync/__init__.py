"""Training under the synchronous rule. The door is ``training``."""
