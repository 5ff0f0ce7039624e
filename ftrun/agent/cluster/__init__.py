"""Connections of this agent to other agents and to etcd, and the control loop behind them."""
