"""Settings of evaluations by the key that contains them, for rules, and the lengths that they allow."""

from __future__ import annotations

from slimx.config.sections.eval import Eval


def by_key(options: Eval) -> dict[str, Eval]:
    """Returns the settings that evaluations use, by the key that contains them: "eval", or that of a set with its
    own."""
    settings = {}
    for name, of_set in options.sets.items():
        changed = options.prompts is not None and options.prompts[name].changes
        settings[f"eval.prompts.{name}" if changed else "eval"] = of_set
    return settings or {"eval": options}


def lengths(options: Eval) -> dict[str, int]:
    """Returns the maximum numbers of tokens per turn, by key, that section `eval` sets; {} if answers may be as long as
    in training, or if the run does not evaluate."""
    found = {}
    if options.files:
        for key, of_set in by_key(options).items():
            if of_set.max_new_tokens is not None:
                found[f"{key}.max_new_tokens"] = of_set.max_new_tokens
    return found
