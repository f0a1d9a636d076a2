"""Training on several processes: launch, collectives, and the stages from naive data parallelism on.

Every collective takes its process group as an argument; None is the default group of the launch.
"""
