"""What a user writes is checked before anything starts: a refusal is one sentence with thing, place and what to do.

The refusals are met as a user meets them: through the command line, with its exit code and what it prints.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
import yaml

from slimx import cli
from slimx.config import load_config
from slimx.errors import SlimxError
from slimx.observability.live.run_lock import held
from slimx.observability.tracking.run_files import read_config
from tests.refusals import numbers
from tools.quickstart.make_model import make_model

PROMPT = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    make_model(out, seed=1)
    return out


@pytest.fixture
def file(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration in which nothing is wrong; `run` fails the test if it starts anything."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps(PROMPT) + "\n")
    config = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": str(model)},
        "numerics": {"dtype": "float32"},
        "rollout": {
            "prompts": str(tmp_path / "prompts.jsonl"),
            "max_prompt_tokens": 64,
            "sampling": {"max_new_tokens": 4},
            "engines": [{"name": "actor", "threads": 1}],
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run.yaml"


class Started(Exception):
    """The checks passed: the run would start now."""


class Command:
    """`slimx train`, up to the moment when Ray would start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        from slimx.orchestration import session

        def start(config: object, device: str, work: object) -> None:
            raise Started

        monkeypatch.setattr(session, "run_with_ray", start)
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def run(self, file: Path, *overrides: str) -> None:
        self.monkeypatch.setattr(sys, "argv", ["slimx", "train", str(file), *overrides])
        cli.main()

    def refuses(
        self, file: Path, *overrides: str, code: str, about: str | None = None, named: Collection[str] = ()
    ) -> str:
        """The sentence with which the run is refused, which holds what is `named`."""
        refusal, *_ = self.problems(file, *overrides)
        assert refusal.code == code and refusal.about == (about or refusal.about)
        assert all(each in str(refusal) for each in named), refusal
        return str(refusal)

    def problems(self, file: Path, *overrides: str) -> tuple[SlimxError, ...]:
        """The refusal, and those that it joins."""
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            self.run(file, *overrides)
        printed = self.capsys.readouterr()
        assert exit.value.code == 2
        assert printed.out == ""
        assert printed.err.startswith("slimx: ") and len(printed.err.splitlines()) == 1, printed.err
        assert not file.with_name("run").exists(), "a refused run left its directory"
        error = exit.value.__context__
        assert isinstance(error, SlimxError) and printed.err == f"slimx: {error}\n"
        return error, *getattr(error, "problems", ())

    def codes(self, file: Path, *overrides: str) -> list[tuple[str, str]]:
        """Code of each problem, and what it is about."""
        return [(problem.code, problem.about) for problem in self.problems(file, *overrides)]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def test_a_configuration_in_which_nothing_is_wrong_starts(command, file):
    with pytest.raises(Started):
        command.run(file)


# Keys ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "unknown", "named"),
    [
        ("algoritm.name=sft", "algoritm", "algorithm?"),
        ("run.nmae=x", "run.nmae", "run.name?"),
        ("trainer.optimizer.weight_deacy=0", "trainer.optimizer.weight_deacy", "trainer.optimizer.weight_decay?"),
        (
            "rollout.engines=[{name: actor}, {name: other, cuont: 2}]",
            "rollout.engines.1.cuont",
            "rollout.engines.1.count?",
        ),
        ("model.xyz=1", "model.xyz", "family, path"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(command, file, override, unknown, named):
    refusal, *_ = command.problems(file, override)
    assert (refusal.code, refusal.about) == ("config.unknown_key", unknown) and named in str(refusal)


def test_all_problems_of_a_configuration_are_told_at_once(command, file):
    codes = command.codes(file, "run.nmae=x", "schedule.steps=0")
    assert {("config.unknown_key", "run.nmae"), ("config.value", "schedule.steps")} <= {*codes}


def test_a_missing_key_is_named_with_the_way_to_set_it(command, file):
    config = yaml.safe_load(file.read_text())
    del config["run"]["dir"]
    file.write_text(yaml.safe_dump(config))
    assert ("config.missing_key", "run.dir") in command.codes(file)


@pytest.mark.parametrize(
    ("override", "code", "about"),
    [
        ("trainer.optimizer.lr=fast", "config.value", "trainer.optimizer.lr"),
        ("trainer.optimizer.lr=nan", "config.value", "trainer.optimizer.lr"),
        ("numerics.dtype=float16", "config.value", "numerics.dtype"),
        ("schedule.max_staleness=-1", "config.value", "schedule.max_staleness"),
        ("schedule.window=1", "flow.window", "schedule.window"),
        ("schedule={window: 1, max_staleness: 1}", "flow.window", "schedule.window"),
        (
            "schedule={max_staleness: 1, straggler_deadline: 60, step_deadline: 60}",
            "flow.straggler_deadline",
            "schedule.straggler_deadline",
        ),
        ("schedule.straggler_deadline=60", "flow.straggler_deadline", "schedule.straggler_deadline"),
        ("rollout.over_sampling=0.5", "config.value", "rollout.over_sampling"),
        ("rollout.partial=true", "flow.partial", "rollout.partial"),
        ("algorithm.mask_stale_tokens=true", "flow.mask_stale_tokens", "algorithm.mask_stale_tokens"),
        ("schedule={colocate: true, max_staleness: 1}", "flow.colocate", "schedule.colocate"),
        ("rollout.sampling.top_k=0", "sampling.top_k", "rollout.sampling.top_k"),
        ("rollout.sampling.top_k=5000", "sampling.top_k", "rollout.sampling.top_k"),
        ("algorithm.kl_coef=0.1", "algorithm.reference", "algorithm.kl_coef"),
        ("trainer.megatron={moe_aux_loss_coeff: 0.1}", "trainer.megatron", "trainer.megatron.moe_aux_loss_coeff"),
        ("trainer.megatron={fp8: e4m3}", "trainer.megatron", "trainer.megatron.fp8"),
        ("trainer.megatron={use_mup: true}", "trainer.megatron", "trainer.megatron.use_mup"),
        ("trainer.moe.aux_loss_coef=-1", "config.value", "trainer.moe.aux_loss_coef"),
        ("trainer.moe.aux_loss_type=aux_loss", "routing.aux_loss_type", "trainer.moe.aux_loss_type"),
        ("rollout.engines=[]", "algorithm.engines", "rollout.engines"),
        ("rollout.engines=[{name: a}, {name: a}]", "engines.name_twice", "rollout.engines"),
        ("run.dir", "config.override", "run.dir"),
        ("run.name={a", "config.override", "run.name={a"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_key(command, file, override, code, about):
    assert (code, about) in command.codes(file, override)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("- a list\n", "config.no_sections"),
        ("run:\n\tdir: x\n", "config.not_yaml"),
        (f"trainer: {{world_size: {'9' * 5000}}}\n", "config.not_yaml"),
        ("run: " + "[" * 2000 + "]" * 2000, "config.depth"),
        ("run: {dir: a}\nrun: {dir: b}\n", "config.not_yaml"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_name(command, file, text, code):
    file.write_text(text)
    assert command.codes(file) == [(code, str(file))]


def test_a_file_that_does_not_exist_is_refused(command, file):
    assert command.codes(file.with_name("nowhere.yaml")) == [("config.no_file", str(file.with_name("nowhere.yaml")))]


# Overrides ----------------------------------------------------------------------------------------------------------


def test_overrides_are_applied_in_order_and_keep_what_they_do_not_name(file):
    config = load_config(
        file, ["schedule.steps=7", "trainer.optimizer.lr=1e-3", "schedule.steps=9", "reward.deadline=5"]
    )
    assert (config.schedule.steps, config.trainer.optimizer.lr, config.reward.deadline) == (9, 1e-3, 5)
    assert config.rollout.max_prompt_tokens == 64 and config.numerics.dtype == "float32"


def test_overrides_take_null_lists_and_text_with_equals_signs(file):
    config = load_config(file, ["reward.function=null", "algorithm.name=sft", "rollout.engines=[]", "run.name=a=b"])
    assert config.reward.function is None and config.rollout.engines == () and config.run.name == "a=b"


def test_what_is_written_of_a_run_holds_no_value_of_the_environment(file, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "top-secret")
    monkeypatch.setenv("STEPS", "2")
    config = load_config(
        file,
        [
            "reward.options={headers: [{key: '${oc.env:JUDGE_KEY}'}], note: 'Bearer ${oc.env:JUDGE_KEY}'}",
            "run.name=${reward.options.note}",
            "schedule.steps=${oc.env:STEPS}",
        ],
    )
    assert config.reward.options == {"headers": [{"key": "top-secret"}], "note": "Bearer top-secret"}
    assert (config.run.name, config.schedule.steps) == ("Bearer top-secret", 2)
    # Configurations that are made from it know as much.
    for each in (config, config.model_copy(update={"schedule": config.schedule})):
        assert "top-secret" not in each.to_text() and "top-secret" not in json.dumps(each.to_plain())
    written = tmp_path / "config.yaml"
    written.write_text(config.to_text())
    assert load_config(written) == config and load_config(written).to_text() == config.to_text()
    assert read_config(written.parent)["run"]["name"] == "Bearer top-secret"
    monkeypatch.delenv("JUDGE_KEY")
    assert read_config(written.parent)["run"]["name"] == "${reward.options.note}"


def test_a_configuration_cannot_be_changed_after_it_was_checked(file):
    with pytest.raises(ValueError, match="frozen"):
        load_config(file).run.seed = 2


# Layout -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "code", "about"),
    [
        (["trainer.expert=3", "trainer.world_size=3"], "layout.divides", "trainer.expert"),
        (
            ["trainer.tensor=2", "trainer.world_size=3"],
            "trainer.world_size",
            "trainer.world_size",
        ),
        (
            ["trainer.world_size=4", "trainer.data=2"],
            "trainer.world_size",
            "trainer.world_size",
        ),
        (
            ["trainer.world_size=2", "trainer.pipeline=2", "trainer.layers_per_stage=[2,1]"],
            "layout.layers_per_stage",
            "trainer.layers_per_stage",
        ),
        (["trainer.virtual_pipeline=2"], "layout.virtual_pipeline", "trainer.virtual_pipeline"),
        (["trainer.world_size=3", "trainer.expert=2"], "trainer.expert", "trainer.expert"),
        (["trainer.world_size=2", "trainer.expert=4"], "trainer.expert", "trainer.expert"),
        (["trainer.world_size=4", "trainer.pipeline=4"], "layout.pipeline", "trainer.pipeline"),
        (["trainer.world_size=4", "trainer.tensor=4"], "layout.divides", "trainer.tensor"),
        (
            ["trainer.world_size=2", "trainer.tensor=2", "trainer.expert_tensor=1"],
            "trainer.expert_tensor",
            "trainer.expert_tensor",
        ),
        (
            ["trainer.moe.routing_replay=R3", "rollout.routed_experts=false"],
            "routes.engine",
            "trainer.moe.routing_replay",
        ),
        (["trainer.moe.bias_update_rate=0.001"], "routing.selection_bias", "trainer.moe.bias_update_rate"),
        (
            [
                "algorithm.name=reinforce_pp",
                "rollout.prompts_per_step=1",
                "rollout.group_size=1",
                "trainer.world_size=2",
            ],
            "batch.ranks",
            "trainer.data",
        ),
        (
            [
                "algorithm.name=reinforce_pp",
                "schedule.updates_per_step=4",
                "rollout.prompts_per_step=4",
                "rollout.group_size=1",
                "trainer.data=2",
            ]
            + ["trainer.world_size=2"],
            "batch.ranks",
            "trainer.data",
        ),
        (
            [
                "rollout.max_prompt_tokens=60",
                "rollout.sampling.max_new_tokens=8",
                "trainer.max_tokens_per_microbatch=66",
            ],
            "batch.microbatch",
            "trainer.max_tokens_per_microbatch",
        ),
        (
            [
                "rollout.max_prompt_tokens=60",
                "rollout.sampling.max_new_tokens=8",
                "trainer.max_tokens_per_microbatch=67",
            ]
            + ["trainer.context=2", "trainer.world_size=2"],
            "batch.microbatch",
            "trainer.max_tokens_per_microbatch",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_its_key(command, file, overrides, code, about):
    assert (code, about) in command.codes(file, *overrides)


def test_a_rollout_that_a_microbatch_does_not_hold_is_told_how_many_tokens_it_needs(command, file):
    keys = ["rollout.max_prompt_tokens=60", "rollout.sampling.max_new_tokens=8", "trainer.max_tokens_per_microbatch=66"]
    told = {"code": "batch.microbatch", "about": "trainer.max_tokens_per_microbatch"}
    assert numbers(command.refuses(file, *keys, **told))[-1] == 67
    padded = ["trainer.context=2", "trainer.world_size=2"]
    assert numbers(command.refuses(file, *keys, *padded, **told))[-1] == 68


@pytest.mark.parametrize(
    ("overrides", "code", "about", "named"),
    [
        (
            ["trainer.megatron.moe_capacity=2"],
            "trainer.megatron_field",
            "trainer.megatron.moe_capacity",
            "TransformerConfig",
        ),
        (
            ["trainer.megatron.moe_router_dtyp=fp32"],
            "trainer.megatron_field",
            "trainer.megatron.moe_router_dtyp",
            "moe_router_dtype?",
        ),
        (
            ["trainer.recompute.granularity=selective", "trainer.recompute.modules=[mla_up_proj]"],
            "trainer.megatron_core",
            "{model}",
            "mla_up_proj",
        ),
        (
            ["cluster.device=cpu", "trainer.attention=flash"],
            "trainer.no_cuda",
            "trainer.attention",
            "trainer.attention=auto",
        ),
        (
            ["cluster.device=cpu", "trainer.moe.dispatcher=flex"],
            "trainer.no_cuda",
            "trainer.moe.dispatcher",
            "trainer.moe.dispatcher=alltoall",
        ),
    ],
)
def test_what_megatron_or_the_machine_cannot_run_is_refused_before_anything_starts(
    command, file, model, overrides, code, about, named
):
    command.refuses(file, *overrides, code=code, about=about.format(model=model), named=[named])


# Checkpoint ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["model.path", "trainer.load"])
def test_a_missing_checkpoint_is_refused_by_its_path(command, file, key):
    code = {"model.path": "model.directory", "trainer.load": "checkpoint.none"}[key]
    command.refuses(file, f"{key}=/no/such/model", code=code, about="/no/such/model")


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
        ("rollout.generate=generate", "dotted.path", "'generate'"),
        ("rollout.generate=hooks.not_async", "dotted.async", "async def not_async(ctx, prompt)"),
        ("rollout.generate=hooks.one_argument", "dotted.signature", "async def one_argument(ctx, prompt)"),
        ("reward.function=hooks.NUMBER", "dotted.callable", "async def NUMBER(ctx, trajectory)"),
        ("rollout.filter=hooks.generate", "dotted.signature", "def generate(group)"),
        ("rollout.filter=hooks.async_keep", "dotted.async", " def async_keep(group)"),
        ("rollout.generate=broken.generate", "dotted.raised", "NameError"),
    ],
)
def test_a_hook_that_cannot_serve_is_refused_with_its_key_and_the_right_shape(
    command, file, override, code, named, tmp_path, monkeypatch
):
    (tmp_path / "hooks.py").write_text(
        "NUMBER = 5\n"
        "async def generate(ctx, prompt): ...\n"
        "def not_async(ctx, prompt): ...\n"
        "async def one_argument(ctx): ...\n"
        "async def async_keep(group): ...\n"
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
        [sys.executable, "-m", "slimx.cli", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


@pytest.mark.costly
@pytest.mark.parametrize("name", ["train", "doctor"])
def test_the_process_prints_the_sentence_alone_and_exits_with_2(file, name):
    done = slimx(name, file, "run.nmae=x")
    assert done.returncode == 2
    assert re.fullmatch(r"slimx: override 'run\.nmae=x': .*run\.nmae.*run\.name.*\n", done.stderr)


@pytest.mark.costly
def test_debug_adds_the_traceback(file):
    done = slimx("train", file, "run.nmae=x", "--debug")
    assert done.returncode != 0 and "Traceback" in done.stderr
    assert {"run.nmae", "run.name"} <= {*re.findall(r"run\.\w+", done.stderr.splitlines()[-1])}


def test_load_config_raises_the_one_error_that_users_read(file):
    with pytest.raises(SlimxError):
        load_config(file, ["no.such=key"])


def test_a_second_process_in_the_same_run_directory_is_refused(command, file, tmp_path):
    (tmp_path / "old").mkdir()
    with held(tmp_path / "old"):
        command.refuses(file, f"run.dir={tmp_path}/old", code="run.locked", about=f"{tmp_path}/old")
    with pytest.raises(Started):
        command.run(file, f"run.dir={tmp_path}/old")


def test_a_run_that_must_not_resume_starts_afresh_beside_an_old_checkpoint(command, file, tmp_path):
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
        ("{load: absent}", "checkpoint.none", "absent"),
        ("{placement: own, layout: {world_size: 16, data: 16}}", "batch.critic_ranks", "critic.layout.data"),
        ("{placement: own, layout: {world_size: 3, tensor: 3}}", "critic.split", "critic.layout.tensor"),
    ],
)
def test_a_critic_that_cannot_start_is_refused_before_anything_does(command, file, critic, code, about):
    small = ("rollout.prompts_per_step=2", "rollout.group_size=4")
    command.refuses(file, "algorithm.name=ppo", f"critic={critic}", *small, code=code, about=about)
