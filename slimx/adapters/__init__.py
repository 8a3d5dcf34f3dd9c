"""What an upstream needs from slimx, one file per upstream; each entry says why and for which version."""
