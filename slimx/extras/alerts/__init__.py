"""Alerts about a run: stalled phases, curves that become unusual, disks and GPUs in trouble; their log, command and
webhook."""
