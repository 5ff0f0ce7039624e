"""Prints what a script can see of its device before it uses it, then runs the script.

The random state of the device is read last, because reading it may initialise the device.
"""

import os
import runpy
import sys

import torch


def main() -> None:
    device = torch.get_device_module()
    is_bound = device.is_initialized()
    facts = {
        "environment": sorted(name for name in os.environ if name.startswith("CUDA_")),
        "current": device.current_device(),
        "allocated": [device.memory_allocated(at) for at in range(device.device_count())],
        "random": [torch.initial_seed(), torch.get_rng_state().sum().item()],
        "device random": [state.tolist() for state in device.get_rng_state_all()],
    }
    rank, generation = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    place = f"rank={rank} generation={generation} pid={os.getpid()} bound={is_bound}"
    print(f"{place} facts={facts}\n", end="", flush=True)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
