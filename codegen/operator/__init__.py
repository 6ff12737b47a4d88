"""Attention as a torch.library operator: on kernels where they run, as a tiled loop in PyTorch elsewhere."""
