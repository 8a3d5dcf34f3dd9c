"""Processes and threads on one machine: supervision, logs, ports, clocks, asyncio tasks.

In: a command to run, or a function or coroutine to run in a thread or task.
Out: a process that ends together with its parent, and errors that name the process's log.
Read first: `process.py`.
"""
