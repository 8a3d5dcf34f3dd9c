"""Programs in a sandbox of namespaces on this machine: one program per call."""
