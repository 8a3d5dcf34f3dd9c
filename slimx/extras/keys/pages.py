"""Purpose and page of each section of the configuration."""

from __future__ import annotations

SECTIONS = {
    "run": ("name, directory and seed of the run; resume and fork", "operations.md"),
    "model": ("directory of the model", "models.md"),
    "numerics": ("data type, and exact or fast numerics", "numerics.md"),
    "cluster": ("machines, GPUs and Ray", "planning.md"),
    "trainer": ("parallel sizes, memory, kernels and optimizer", "trainer.md"),
    "rollout": ("prompts, sampling, engines and hooks", "rollouts.md"),
    "reward": ("reward functions", "hooks.md"),
    "algorithm": ("preset, loss, advantages, KL and corrections", "algorithms.md"),
    "critic": ("value model of PPO", "algorithms.md"),
    "policies": ("further policies that are trained", "policies.md"),
    "schedule": ("steps, updates, staleness and colocation", "flow.md"),
    "publish": ("transfer of new weights to engines", "publication.md"),
    "checkpoint": ("what is saved, and how often", "checkpoints.md"),
    "eval": ("held-out prompts", "rollouts.md"),
    "track": ("metrics, reports and saved rollouts", "metrics.md"),
    "alerts": ("alerts that are off, and the form of messages to a webhook", "operations.md"),
    "recovery": ("replacement of lost trainers", "fault-tolerance.md"),
}
"""Purpose of each section in a few words, and its page in docs/."""
REFERENCE = "docs/configuration.md"


def purpose_of(section: str) -> str:
    """Returns the purpose of the top-level section `section`; "" for a section of another package."""
    return SECTIONS.get(section, ("", ""))[0]


def pages_of(heading: str) -> tuple[str, ...]:
    """Returns the pages about the section at the dotted key `heading`: the reference with its anchor and, if there is
    one, the page that explains it."""
    anchor = heading.replace(".*", "").replace(".", "")
    section = heading.partition(".")[0]
    explained = (f"docs/{SECTIONS[section][1]}",) if section in SECTIONS else ()
    return (f"{REFERENCE}#{anchor}", *explained)
