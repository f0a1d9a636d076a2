"""Turn samples into frames, tables, figures, pages and the report, and compare two runs."""
