"""What is seen from outside: status samples, outputs."""
