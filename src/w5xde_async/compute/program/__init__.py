"""Programs: a training step as data, for workers without the model's code. See docs/code-free.md."""
