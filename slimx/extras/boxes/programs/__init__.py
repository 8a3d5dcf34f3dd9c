"""Sandboxes of namespaces on this machine that run one program per call."""
