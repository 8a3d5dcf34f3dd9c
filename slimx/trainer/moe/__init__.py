"""Routing of mixture-of-experts layers, recorded and replayed."""
