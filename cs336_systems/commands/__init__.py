"""The subcommands of `cs336-systems` that have a file of their own; `cli.py` registers them."""
