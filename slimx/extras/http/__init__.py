"""HTTP servers and clients for untrusted peers: bounded connections and bodies, no redirects."""
