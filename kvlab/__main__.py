"""`python -m kvlab`: the Hydra app, or one of the small subcommands."""

from kvlab.cli import main

if __name__ == "__main__":
    main()
