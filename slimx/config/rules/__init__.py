"""Rules between sections that need the configuration alone: they are asked when it is loaded."""

from slimx.config.rule import rules_in
from slimx.config.rules import (
    activations,
    algorithm,
    data_parallel,
    flow,
    fp8,
    lora,
    optimizer,
    policies,
    qat,
    reward_model,
    serving,
    updates,
)

RULES = rules_in(
    algorithm,
    serving,
    updates,
    flow,
    lora,
    optimizer,
    data_parallel,
    qat,
    fp8,
    activations,
    reward_model,
    policies,
)
