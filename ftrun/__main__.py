"""`python -m ftrun` is `ftrun`."""

from ftrun.cli.app import main

if __name__ == "__main__":
    main()
