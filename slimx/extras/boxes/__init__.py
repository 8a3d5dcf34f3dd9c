"""Sandboxes that isolate programs of a model, in namespaces, in containers or on other machines, and a terminal in
them."""
