"""Published launch scripts become configurations that slimx plans without a line written by hand. The fixtures have
their flags and values: scripts/slime.json of slime (2026-08-21), scripts/verl.json of verl (2026-08-22)."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.config.suggestions import for_flag
from slimx.errors import SlimxError
from slimx.extras.foreign.find import of_key
from slimx.extras.foreign.scripts.draft import Draft
from slimx.extras.foreign.scripts.from_slime import read_slime
from slimx.extras.foreign.scripts.from_verl import read_verl
from slimx.extras.foreign.scripts.shell.options import Launch, flags_of, keys_of
from slimx.extras.foreign.scripts.translate import UNKNOWN
from slimx.extras.planner.planning import run_plan
from tests.extras.foreign.published_models import model_of, write_model
from tests.refusals import refused

FOLDER = Path(__file__).parent / "scripts"
SLIME = json.loads((FOLDER / "slime.json").read_text())
VERL = json.loads((FOLDER / "verl.json").read_text())
SCRIPTS = {f"slime/{name}": line for name, line in SLIME["scripts"].items()}
SCRIPTS |= {f"verl/{name}": line for name, line in VERL["scripts"].items()}
REFUSED = {
    "slime/scripts/low_precision/run-qwen3-30b-a3b-fp8.sh": {"unproven"},
    "slime/scripts/run-glm4.7-30B-A3B.sh": {"trainer.expert"},
    "verl/examples/grpo_trainer/run_qwen3_235b_a22b_megatron.sh": {"trainer.expert"},
    "verl/examples/grpo_trainer/run_qwen3_30b_a3b_megatron.sh": {"trainer.expert"},
}
"""Scripts whose configuration slimx refuses, with the codes of the reasons: fp8 training with an offloaded optimizer,
and experts over more ranks than a pipeline stage has."""
UNPLANNED = {
    "slime/examples/delta_weight_sync/run-glm4.7-30B-A3B-delta.sh": "trainer.pipeline",
    "slime/scripts/run-glm4-9B.sh": "family",
    "slime/scripts/run-mimo-7B-rl-eagle.sh": "model.no_engine",
    "verl/examples/grpo_trainer/run_deepseek_v4_flash_megatron.sh": "family",
    "verl/examples/grpo_trainer/run_hy_v3_megatron.sh": "family",
    "verl/examples/grpo_trainer/run_kimi_k2_6_glm5_1_megatron_lite.sh": "trainer.pipeline",
    "verl/examples/grpo_trainer/run_nemotron_nano_v3_30b_a3b_megatron.sh": "trainer.tensor",
    "verl/examples/mtp_trainer/run_mimo_7b_mtp_fully_async_megatron_multinode.sh": "model.no_engine",
    "verl/examples/mtp_trainer/run_mimo_7b_mtp_megatron.sh": "model.no_engine",
    "verl/examples/mtp_trainer/run_mimo_7b_mtp_rl_vllm_sgl_megatron.sh": "model.no_engine",
    "verl/examples/sft/gsm8k/run_deepseek_v4_megatron_lite.sh": "family",
    "verl/examples/sft/gsm8k/run_nemotron_nano_v3_megatron.sh": "trainer.tensor",
}
"""Scripts whose run a plan refuses: the key that does not fit the model (47 layers in 2 stages, 61 in 8, 2 query groups
over 8 ranks), the code for a family without engines, or "family" for a model that slimx does not have."""
QUICK = ("run-qwen3-4B.sh", "run_qwen2.5_3B.sh", "retool_qwen3_4b_sft.sh", "gpg_trainer/run_qwen3_8b_megatron.sh")
"""Scripts of small models, whose plans take a tenth of a second."""


def planned(script: str) -> Any:
    """Returns a parameter of a test; plans of large models are slow."""
    slow = pytest.mark.slow("plans of models with hundreds of experts take seconds each")
    return pytest.param(script, marks=[] if script.endswith(QUICK) else [slow])


def draft_of(script: str, folder: Path) -> Draft:
    """Returns the draft of a script whose checkpoints lie in `folder`, as far as slimx has their families."""
    before, program, words = [], "", shlex.split(SCRIPTS[script])
    while not program:
        word = words.pop(0)
        if word.startswith("-"):
            before.append(word)
        else:
            program = word
    draft = Draft(script)
    read = read_slime if script.startswith("slime/") else read_verl
    found = []
    for word in words:
        key, equals, path = word.rpartition("model.path=")
        if (found and found[-1] == "--hf-checkpoint") or (equals and key in ("", "actor_rollout_ref.")):
            model = write_model(path, folder)
            word = word if model is None else f"{key}{equals}{model}"
        found.append(word)
    read(Launch(program, tuple(found), tuple(before)), draft)
    for key in [key for key in draft.settings if key.endswith(".model") or key == "model.path"]:
        write_model(str(draft.get(key)), folder)
    return draft


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_published_script_becomes_a_configuration(tmp_path, script):
    draft = draft_of(script, tmp_path)
    text, refusals = draft.text()
    assert bool(refusals) == (script in REFUSED)
    assert UNKNOWN not in draft.left.values()
    (tmp_path / "run.yaml").write_text(text)
    if refusals:
        with pytest.raises(SlimxError) as caught:
            load_config(tmp_path / "run.yaml")
        problems = getattr(caught.value, "problems", ()) or (caught.value,)
        assert {problem.code for problem in problems} == REFUSED[script]
    else:
        load_config(tmp_path / "run.yaml")


@pytest.mark.parametrize("script", [planned(script) for script in SCRIPTS if script not in REFUSED])
def test_a_published_script_is_planned_without_a_line_by_hand(tmp_path, script):
    (tmp_path / "run.yaml").write_text(draft_of(script, tmp_path).text()[0])
    config = load_config(tmp_path / "run.yaml")
    reason = UNPLANNED.get(script)
    if reason is None:
        assert run_plan(config).violations == ()
    elif reason.startswith("trainer."):
        assert [reason in violation for violation in run_plan(config).violations] == [True]
    elif reason == "family":
        assert model_of(config.model.path) is None
        with pytest.raises(SlimxError, match=re.escape(config.model.path)):
            run_plan(config)
    else:
        with refused(reason):
            run_plan(config)


def test_most_published_scripts_need_no_line_by_hand():
    good = [script for script in SCRIPTS if script not in REFUSED and script not in UNPLANNED]
    of_slime = [script for script in good if script.startswith("slime/")]
    assert len(SLIME["scripts"]) == 44 and len(of_slime) == 39
    assert len(VERL["scripts"]) == 36 and len(good) - len(of_slime) == 25


def test_every_name_in_a_published_script_has_an_answer():
    for script, line in SCRIPTS.items():
        words = shlex.split(line)
        if script.startswith("slime/"):
            for flag, values in flags_of([*words, *shlex.split(SLIME["shapes"])]).items():
                assert for_flag(Config, f"--{flag}", " ".join(values) or "true") is not None, flag
        else:
            for key, value in keys_of(words)[0].items():
                if not key.startswith(("engine.", "optim.", "model.")):  # sections of sft_trainer
                    assert of_key(key, value) is not None, key
