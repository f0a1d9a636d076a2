"""Entry point of `python -m cs336_systems`, which is the command `cs336-systems`."""

import sys


def main() -> None:
    """Run the command line; exit with code 2 if the packages of the extra `lab` are not installed.

    One line on stderr then names the missing package.
    """
    try:
        from cs336_systems.cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or __package__).partition(".")[0] == __package__:
            raise  # a module of this package is missing: our own mistake
        cure = "the command line needs the extra 'lab': pip install 'cs336-systems[lab]'"
        print(f"error: {error.name} is not installed, and {cure}", file=sys.stderr)
        raise SystemExit(2) from None
    run()


if __name__ == "__main__":
    main()
