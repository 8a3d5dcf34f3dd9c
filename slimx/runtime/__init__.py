"""Processes of one machine: supervision, logs, ports, clocks, threads.

In: a command to run, or work for a thread or a task.
Out: a process that ends with its parent, and errors that name its log.
Read first: `process.py`.
"""
