"""One link to the coordinator: joining, what comes in, what goes out."""
