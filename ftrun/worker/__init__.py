"""PROCESS: the zygote and the library inside each training process. All that may import torch."""
