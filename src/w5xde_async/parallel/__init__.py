"""More than one device for one model: islands on ``torch.distributed``."""
