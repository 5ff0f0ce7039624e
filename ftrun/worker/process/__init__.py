"""Zygote, standby and start of a rank; heartbeat, lease, faults in the process."""
