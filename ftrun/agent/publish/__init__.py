"""What the agent publishes: status, metrics, network.json, hooks, the summary line."""
