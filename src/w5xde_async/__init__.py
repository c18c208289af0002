"""w5xde_async: train one PyTorch model on whatever machines are at hand, to the same bits."""

__version__ = "0.1.0"
