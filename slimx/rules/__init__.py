"""Rules that a run is checked by before it starts: one file for a topic, with all of its rules, of a configuration
alone and of models, machines and files (`slimx.config.rule`).

Each file is an entry point of the group `slimx.rules`, as are files with rules of extras. They are imported when the
first configuration is loaded: what takes long to import (numpy, torch, families of models) is imported by the rule that
needs it.
"""
