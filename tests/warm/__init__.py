"""Starts programs of tests as forks of a process that has imported what they need, which takes seconds of a core.

    parent --exec--> client (client.py) --arguments, variables, files--> zygote (zygote.py) --fork--> program
    parent <------- signals, exit status -----------------------------------------------> program

The client looks like an interpreter (interpreter.py), so that Ray starts its workers by it too. A server under a guard
stands below the process that starts it: there the guard is forked, and forks the server (guards.py). For tests that are
not about starting or dying: a program's parent is its zygote.
"""
