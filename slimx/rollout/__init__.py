"""Engines that generate: server process, control, router, client."""
