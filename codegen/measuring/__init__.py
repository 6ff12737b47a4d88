"""Measure candidates in a process that may crash or hang, and let the best few run again."""
