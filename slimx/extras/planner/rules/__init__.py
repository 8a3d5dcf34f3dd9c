"""Rules about the GPUs, nodes and memory that a plan is made for."""

from slimx.config.rule import rules_in
from slimx.extras.planner.rules import machine, memory
from slimx.preflight.checks import RULES

PLAN_RULES = RULES + rules_in(machine, memory)
"""Rules of the core that need a model, and those of plans."""
