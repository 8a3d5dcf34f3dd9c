"""Published data sets as files of prompts, and checks of such files as a run would read them."""
