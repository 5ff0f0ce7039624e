"""Runs the command line as `python -m ftrun`."""

from ftrun.cli.app import main

if __name__ == "__main__":
    main()
