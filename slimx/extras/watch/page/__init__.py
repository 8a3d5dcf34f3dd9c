"""`slimx watch`: a live page about one run. It reads only the run's directory, so it does not slow the run down."""
