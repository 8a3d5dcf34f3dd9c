"""Processes of one machine: supervision, ports, clocks, threads."""
