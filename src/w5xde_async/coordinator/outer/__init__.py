"""Training under rules that take results as they come. The door is ``training``."""
