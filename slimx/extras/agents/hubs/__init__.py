"""Environments that other projects have written, run as they are: each module is the adapter of one interface."""
