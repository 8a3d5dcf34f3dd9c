"""Programs in a sandbox of namespaces on this machine: one call, one program."""
