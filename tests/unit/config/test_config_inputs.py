"""Checkpoints, hooks, prompts and directories that a configuration names are checked before anything starts.

The refusals are met as a user meets them: through the command line, with its exit code and what it prints.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slimx.config.load import load_config
from slimx.config.sections.algorithm import Algorithm
from slimx.config.sections.critic import Critic
from slimx.config.sections.engines import Engines
from slimx.config.sections.eval import EvalSet
from slimx.config.sections.general import Model, RunSection
from slimx.config.sections.publish import Publish
from slimx.config.sections.rollout import PromptSet, Rollout
from slimx.config.sections.trainer import Lora, Trainer
from slimx.errors import SlimxError
from slimx.observability.live.run_lock import locked
from tests.refusals import numbers, refused
from tests.unit.config.command_stand import PROMPT, Started

# Checkpoint ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["model.path", "trainer.load"])
def test_a_missing_checkpoint_is_refused_by_its_path(command, file, key):
    code, about = {
        "model.path": ("model.directory", "/no/such/model"),
        "trainer.load": ("weights.directory", "trainer.load"),
    }[key]
    command.refuses(file, f"{key}=/no/such/model", code=code, about=about)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (
            lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
            "checkpoint.file",
        ),
        (lambda d: (d / "config.json").write_text("{"), "checkpoint.json"),
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.missing"),
        (lambda d: (d / "model.safetensors").unlink(), "checkpoint.none"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_its_path(command, file, model, tmp_path, damage, code):
    copy = tmp_path / "damaged"
    shutil.copytree(model, copy)
    damage(copy)
    command.refuses(file, f"model.path={copy}", code=code, named=[str(copy)])


@pytest.mark.parametrize(
    ("change", "code", "about", "named"),
    [
        ({"num_hidden_layers": 3}, "checkpoint.missing", "model.layers.2.input_layernorm.weight", []),
        ({"hidden_size": 64}, "checkpoint.shape", "model.embed_tokens.weight", ["[128, 128]", "[128, 64]"]),
        ({"architectures": ["BertForMaskedLM"]}, "model.unknown", "BertForMaskedLM", ["Qwen3MoeForCausalLM"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(
    command, file, model, tmp_path, change, code, about, named
):
    copy = tmp_path / "other"
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    command.refuses(file, f"model.path={copy}", code=code, about=about, named=[str(copy), *named])


# Hooks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "code", "named"),
    [
        ("rollout.generate=no_such_package.hook", "dotted.import", "no_such_package.hook"),
        ("rollout.generate=hooks.generat", "dotted.missing", "generat"),
        ("rollout.generate=generate", "dotted.name", "'generate'"),
        ("rollout.generate=hooks/generate", "dotted.path", "hooks.generate"),
        ("rollout.generate=hooks.one_argument", "dotted.signature", "def one_argument(ctx, prompt)"),
        ("reward.function=hooks.NUMBER", "dotted.callable", "def NUMBER(ctx, trajectory)"),
        ("rollout.filter=hooks.generate", "dotted.signature", "def generate(group)"),
        ("rollout.generate=broken.generate", "dotted.raised", "NameError"),
    ],
)
def test_an_unsuitable_hook_is_refused_with_the_right_signature(
    command, file, override, code, named, tmp_path, monkeypatch
):
    (tmp_path / "hooks.py").write_text(
        "NUMBER = 5\nasync def generate(ctx, prompt): ...\nasync def one_argument(ctx): ...\n"
    )
    (tmp_path / "broken.py").write_text("no_such_name\n")
    for name in ("hooks", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    command.refuses(file, override, code=code, about=override.partition("=")[0], named=[named])


def test_a_key_that_sglang_does_not_know_is_refused(command, file):
    command.refuses(
        file,
        "rollout.engines=[{sglang: {chunked_prefill_siez: 64}}]",
        code="sglang.argument",
        about="rollout.engines.sglang.chunked_prefill_siez",
        named=["chunked_prefill_size?"],
    )


# Prompts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "named"),
    [
        ('{"messages": [', "prompts.line", "truncated"),
        ("[1]", "prompts.line", "list"),
        ('{"mesages": []}', "prompts.key", "'mesages'"),
        ('{"answer": "2"}', "prompts.neither", "token_ids"),
        ('{"token_ids": ["a"]}', "prompts.type", "token_ids[0]"),
        ('{"messages": [{"role": "user"}]}', "prompts.message", "messages[0]"),
    ],
)
@pytest.mark.parametrize("key", ["rollout.prompts", "eval.prompts"])
def test_a_malformed_prompt_line_is_refused_with_file_and_line(command, file, tmp_path, key, line, code, named):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(PROMPT)}\n\n{line}\n")
    command.refuses(file, f"{key}={path}", code=code, named=[f"{path}, line 3: ", named])


def test_a_prompt_file_that_does_not_exist_is_refused(command, file):
    command.refuses(file, "rollout.prompts=/no/prompts.jsonl", code="prompts.unreadable", about="/no/prompts.jsonl")


def test_a_prompt_that_is_too_long_is_refused_by_its_id(command, file):
    sentence = command.refuses(file, "rollout.max_prompt_tokens=5", code="prompts.length", about="prompts:1")
    assert numbers(sentence)[-2:] == [6, 5], "its tokens and the limit"


# As a process -------------------------------------------------------------------------------------------------------


def slimx(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slimx.cli", *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("name", ["train", "doctor"])
def test_the_process_prints_the_sentence_alone_and_exits_with_2(file, name):
    done = slimx(name, file, "run.nmae=x")
    assert done.returncode == 2
    assert re.fullmatch(r"slimx: override 'run\.nmae=x': .*run\.nmae.*run\.name.*\n", done.stderr)


def test_debug_adds_the_traceback(file):
    done = slimx("train", file, "run.nmae=x", "--debug")
    assert done.returncode != 0 and "Traceback" in done.stderr
    assert {"run.nmae", "run.name"} <= {*re.findall(r"run\.\w+", done.stderr.splitlines()[-1])}


def test_load_config_raises_the_one_error_that_users_read(file):
    with pytest.raises(SlimxError):
        load_config(file, ["no.such=key"])


def test_a_second_process_in_the_same_run_directory_is_refused(command, file, tmp_path):
    (tmp_path / "old").mkdir()
    with locked(tmp_path / "old"):
        command.refuses(file, f"run.dir={tmp_path}/old", code="run.locked", about=f"{tmp_path}/old")
    with pytest.raises(Started):
        command.run(file, f"run.dir={tmp_path}/old")


def test_a_run_without_resume_ignores_an_old_checkpoint(command, file, tmp_path):
    checkpoint = tmp_path / "old" / "checkpoints" / "iter_0000002"
    (checkpoint / "slimx").mkdir(parents=True)
    (checkpoint / "slimx" / "manifest.json").write_text("{}")
    with pytest.raises(Started):
        command.run(file, f"run.dir={tmp_path}/old", "run.resume=never")
    state = str(checkpoint / "slimx" / "run.json")
    command.refuses(file, f"run.dir={tmp_path}/old", code="checkpoint.damaged", about=state)


@pytest.mark.parametrize(
    ("critic", "code", "about"),
    [
        ("{load: absent}", "weights.directory", "critic.load"),
        ("{placement: own, layout: {world_size: 16, data: 16}}", "batch.critic_ranks", "critic.layout.data"),
        ("{placement: own, layout: {world_size: 3, tensor: 3}}", "critic.split", "critic.layout.tensor"),
    ],
)
def test_a_critic_that_cannot_start_is_refused_before_anything_does(command, file, critic, code, about):
    small = ("rollout.prompts_per_step=2", "rollout.group_size=4")
    command.refuses(file, "algorithm.name=ppo", f"critic={critic}", *small, code=code, about=about)


# Paths ----------------------------------------------------------------------------------------------------------------

PATHS = [
    (RunSection, {"dir": "~/d", "fork": "~/d"}),
    (Model, {"path": "~/d"}),
    (Trainer, {"load": "~/d"}),
    (Lora, {"rank": 4, "alpha": 8, "load": "~/d"}),
    (Critic, {"load": "~/d"}),
    (Algorithm, {"teacher": "~/d"}),
    (PromptSet, {"name": "a", "path": "~/d"}),
    (Rollout, {"prompts": "~/d", "replay": "~/d"}),
    (Engines, {"model": "~/d"}),
    (EvalSet, {"path": "~/d"}),
    (Publish, {"directory": "~/d"}),
]


@pytest.mark.parametrize(("section", "values"), PATHS)
def test_a_tilde_is_the_home_directory_in_every_key_that_is_a_path(section, values, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    parsed = section.model_validate(values)
    found = {key: getattr(parsed, key) for key in values}
    assert found == json.loads(json.dumps(values).replace("~", str(tmp_path)))


def test_a_tilde_is_the_home_directory_on_the_command_line_too(file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(file.parent))
    overrides = ["run.dir=~/elsewhere", "rollout.engines=[{model: ~/model}]"]
    config = load_config(f"~/{file.name}", overrides)
    assert config.run.dir == str(file.parent / "elsewhere")
    assert config.rollout.engines[0].model == str(file.parent / "model")
    with refused("config.value", about="model.path"):
        load_config(file, ["model.path=~nosuchuser/model"])


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "code", "meant"),
    [
        ("algorithm.name=GRPO", "config.value", "did you mean grpo?"),
        ("algorithm.loss=Clip", "algorithm.unknown", "did you mean clip?"),
        ("algorithm.advantages=RLOO", "algorithm.unknown", "did you mean rloo?"),
        ("algorithm.credit=Shared", "algorithm.unknown", "did you mean shared?"),
        ("schedule.steps 3", "config.override", "write schedule.steps=3"),
        ("run.name=${oc.env:SLIMX_NOPE}", "config.interpolation", "run.name: the environment variable SLIMX_NOPE "),
    ],
)
def test_a_refusal_names_what_was_meant(file, override, code, meant):
    with refused(code) as caught:
        load_config(file, [override])
    assert meant in str(caught.value)
