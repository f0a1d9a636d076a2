"""Run experiments and keep their samples: cells, the processes that measure them, records."""
