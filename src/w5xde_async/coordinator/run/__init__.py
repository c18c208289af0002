"""One run from its start to its end: startup, resume, phases, shutdown. The door is ``run``."""
