"""Who owns the parameters, how they are published, where results are received."""
