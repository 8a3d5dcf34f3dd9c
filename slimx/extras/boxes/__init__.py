"""Sandboxes that isolate programs of a model: namespaces, containers, other machines, and a terminal in them."""
