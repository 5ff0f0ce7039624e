"""PROCESS: the zygote and the library inside each training process; imports torch."""
