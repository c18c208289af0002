"""Events and everything that subscribes to them: bar, metrics file, plot, summary."""
