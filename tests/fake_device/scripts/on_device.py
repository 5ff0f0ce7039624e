"""Runs a training script with all its tensors on the fake device.

Arguments: `default` or `own` (the stream of the training), the script, and its arguments. The
default device of torch is the fake one; TRAINING_DEVICE names it, and TRAINING_BACKEND the backend
for its collectives. With `forked` the script sets the default device itself, in its children: a
module that creates a tensor when it is imported would use the device before the fork.
"""

import contextlib
import os
import runpy
import sys

import torch
from fake_device import collectives, fake

DEVICE = "fake:0"


def main() -> None:
    fake.load()
    collectives.register()
    os.environ["TRAINING_BACKEND"] = collectives.BACKEND
    os.environ["TRAINING_DEVICE"] = DEVICE
    torch.set_num_threads(1)
    _, where, *sys.argv = sys.argv
    if where != "forked":
        torch.set_default_device(DEVICE)
    stream = torch.Stream(DEVICE) if where == "own" else contextlib.nullcontext()
    sys.path[0] = os.path.dirname(sys.argv[0])
    with stream:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
