"""Published data sets as files of prompts, and a look at a file as a run would read it."""
