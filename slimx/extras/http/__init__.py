"""HTTP servers and clients for untrusted peers: limited numbers of connections, limited sizes of bodies, no
redirects."""
