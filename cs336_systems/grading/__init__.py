"""Grading of an implementation by checks of the handout's requirements, run through `adapters.py`.

`check_flash`, `check_ddp`, `check_optimizer` and `check_fsdp` hold the checks, `registry` lists
them. `server` runs each check in processes of its own, and `points` counts the points. Of the rest
of `cs336_systems` only `handout` and `device` are imported: the code under test may be a package of
the same name.

    from cs336_systems.grading.points import Grader, checks_of

    with Grader() as grader:
        for check in checks_of("fsdp"):
            print(check.name, grader.run(check, Path("tests/adapters.py")).status)
"""
