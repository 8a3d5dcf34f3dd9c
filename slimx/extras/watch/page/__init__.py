"""`slimx watch`: a live page about one run, from its directory alone, so that it costs the run nothing."""
