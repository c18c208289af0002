"""The other end: leases in, gradients out."""
