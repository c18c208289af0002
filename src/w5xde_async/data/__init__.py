"""From a dataset to the leaves of a step, read ahead."""
