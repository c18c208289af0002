"""What is wrong between a worker's machine and its coordinator, found without joining the run."""
