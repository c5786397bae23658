"""The benchmark of one GPU: the GPU benchmark."""
