"""Results on their way out: their encoding, and what a lossy codec left out."""
