"""Sandboxes made of Linux namespaces on this machine; each call runs one program."""
