"""Published by the agent: status, metrics, network.json, hooks, the summary line."""
