"""Published data sets as prompt files, and checks of prompt files as a run would read them."""
