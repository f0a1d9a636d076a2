"""What the grade consists of, run on tests/adapters.py: one test a check of `cs336_systems.grading`."""
