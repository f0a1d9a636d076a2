"""How an experiment is run and its samples are kept: cells, the processes that measure them,
records.
"""
