"""What a framework with a loop of its own needs to be used with ftrun: one line in the script.

Each module loads its framework when it is imported, and nothing else does: `ftrun` itself needs
none of them. docs/frameworks.md has an example of each.
"""
