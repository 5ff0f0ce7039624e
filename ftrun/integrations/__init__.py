"""Adapters that let a framework with its own training loop use ftrun with one line in the script.

Each module imports its framework, and `ftrun` itself imports none of them. docs/frameworks.md has
an example of each.
"""
