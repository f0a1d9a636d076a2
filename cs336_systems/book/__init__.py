"""From samples to what is read: frames, tables, figures, pages, the report, and the comparison of
two runs.
"""
