"""`slimx watch`: a live page about one run, from its directory alone, at no cost to the run."""
