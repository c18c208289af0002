"""The interfaces of the two earlier systems, thin over this one: ``facade.w5xde`` and ``facade.guava``."""
