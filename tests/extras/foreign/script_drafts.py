"""Drafts of launch commands in one line, for tests."""

from __future__ import annotations

import shlex

from slimx.extras.foreign.scripts.draft import Draft
from slimx.extras.foreign.scripts.from_slime import read_slime
from slimx.extras.foreign.scripts.from_trl import read_trl
from slimx.extras.foreign.scripts.from_verl import read_verl
from slimx.extras.foreign.scripts.shell.options import Launch, flags_of

PPO = "verl.trainer.main_ppo"
SFT = "verl.trainer.sft_trainer"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def slime(text: str, program: str = "train.py") -> Draft:
    draft = Draft("run.sh")
    read_slime(
        Launch(program, tuple(shlex.split(f"--hf-checkpoint m --prompt-data p --n-samples-per-prompt 2 {text}"))), draft
    )
    return draft


def verl(text: str, program: str = PPO, before: str = "") -> Draft:
    draft = Draft("run.sh")
    words = shlex.split(f"actor_rollout_ref.model.path=m data.train_files=p {ROLLOUT}.n=2 {text}")
    read_verl(Launch(program, tuple(words), tuple(shlex.split(before))), draft)
    return draft


def trl(text: str) -> Draft:
    draft = Draft("run.sh")
    read_trl(flags_of(shlex.split(f"--model_name_or_path m --dataset_name p {text}")), draft)
    return draft


def accepted(draft: Draft) -> dict[str, object]:
    """Returns the keys of a draft that slimx accepts."""
    assert draft.text()[1] == ()
    return draft.settings
