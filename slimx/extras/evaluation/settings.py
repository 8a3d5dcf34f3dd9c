"""Settings of evaluations by the keys under which their values are written, for rules, and the lengths that they
allow."""

from __future__ import annotations

from slimx.config.sections.eval import Eval


def by_keys(options: Eval, *names: str) -> dict[tuple[str, ...], Eval]:
    """Returns the settings that evaluations use, by the keys under which the values of their fields `names` are
    written: of the prompt set if it sets a field, otherwise of section `eval`."""
    found = {}
    for name, of_set in options.sets.items():
        changes = (options.prompts or {})[name].changes
        if changes and not name:  # refused by the rule eval.name
            continue
        keys = [f"eval.prompts.{name}.{field}" if field in changes else f"eval.{field}" for field in names]
        found[tuple(keys)] = of_set
    return found or {tuple(f"eval.{field}" for field in names): options}


def lengths(options: Eval) -> dict[str, int]:
    """Returns the maximum numbers of tokens per turn, by key, that section `eval` sets; {} if answers may be as long as
    in training, or if the run does not evaluate."""
    found = {}
    if options.files:
        for (key,), of_set in by_keys(options, "max_new_tokens").items():
            if of_set.max_new_tokens is not None:
                found[key] = of_set.max_new_tokens
    return found
