"""`python -m cs336_systems` is `cs336-systems`."""

from cs336_systems.cli import main

if __name__ == "__main__":
    main()
