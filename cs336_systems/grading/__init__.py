"""The grade of an implementation: checks of what the handout requires, run through its
`adapters.py`.

`problems` lists the handout's problems and which of them are graded; `flash`, `ddp`, `optimizer`
and `fsdp` hold the checks; `server` runs each in a process of its own; `grade` counts the points.
The rest of `cs336_systems` is not imported here: the code under test may be a package of the same
name.

    with Grader() as grader:
        for check in checks_of("fsdp"):
            print(check.name, grader.run(check, Path("tests/adapters.py")).status)
"""
