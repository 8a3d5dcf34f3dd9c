"""Rules that a run is checked by before it starts: one file for each topic, with all of its rules, whatever facts they
need (`slimx.config.rule`).

Each file is an entry point of the group `slimx.rules`, as are files with rules of extras. They are imported when the
first configuration is loaded: what takes long to import (numpy, torch, families of models) is imported by the rule that
needs it.
"""
