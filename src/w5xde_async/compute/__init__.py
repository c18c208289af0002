"""Forward and backward on one device."""
