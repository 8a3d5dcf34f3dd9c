"""Inference engines: their servers, the fleet of them, and the delivery of weights to them."""
