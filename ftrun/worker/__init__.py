"""PROCESS: the zygote and the library inside each training process; the place of torch."""
