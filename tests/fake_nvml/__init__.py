"""GPUs without GPUs: a library in place of NVML's, for the package nvidia-ml-py."""
