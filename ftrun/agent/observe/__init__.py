"""What the agent observes on its node: ranks, processes, devices, node checks."""
