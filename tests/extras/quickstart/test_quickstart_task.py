"""The quickstart's model is a Qwen3-MoE checkpoint like a published one, and its task is what its docstring says."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from slimx.data.chat.tokens import check_prompts, encode_prompt, load_tokenizer
from slimx.data.prompts.read import read_prompts
from slimx.data.records import Prompt
from slimx.errors import SlimxError
from slimx.extras.quickstart.make_model import CHARACTERS, SPECIALS, make_model
from slimx.extras.quickstart.make_task import make_task

QUICKSTART = Path(__file__).resolve().parents[3] / "slimx/extras/quickstart"
PAIRS = ("pairs.jsonl", "heldout-pairs.jsonl")
FILES = ("train.jsonl", "heldout.jsonl", "demonstrations.jsonl", *PAIRS)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("model")
    make_model(out, seed=1)
    return out


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("task")
    make_task(out, seed=1)
    return out


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return load_tokenizer(model_dir)


@pytest.mark.slow("test_programs.py writes the model in another process, while other programs run")
def test_the_same_seed_gives_the_same_bytes_in_another_process(model_dir, tmp_path):
    command = [sys.executable, str(QUICKSTART / "make_model.py"), "--out", str(tmp_path), "--seed", "1"]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    names = sorted(path.name for path in model_dir.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        assert (model_dir / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_another_seed_gives_other_weights_and_keeps_global_randomness(model_dir, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_model(tmp_path, seed=2)
    assert torch.equal(torch.rand(3), expected)
    assert (model_dir / "model.safetensors").read_bytes() != (tmp_path / "model.safetensors").read_bytes()


def test_weights_have_the_names_and_shapes_of_a_published_checkpoint(model_dir):
    expected = {"model.embed_tokens.weight": (128, 128), "lm_head.weight": (128, 128), "model.norm.weight": (128,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        expected |= {prefix + f"{norm}_layernorm.weight": (128,) for norm in ("input", "post_attention")}
        for name, shape in {"q": (128, 128), "k": (64, 128), "v": (64, 128), "o": (128, 128)}.items():
            expected[prefix + f"self_attn.{name}_proj.weight"] = shape
        expected |= {prefix + f"self_attn.{name}_norm.weight": (32,) for name in "qk"}
        expected[prefix + "mlp.gate.weight"] = (8, 128)
        for expert in range(8):
            for name, shape in {"gate": (64, 128), "up": (64, 128), "down": (128, 64)}.items():
                expected[prefix + f"mlp.experts.{expert}.{name}_proj.weight"] = shape
    weights = load_file(model_dir / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert sum(tensor.numel() for tensor in weights.values()) == 527_104
    experts = [tensor for name, tensor in weights.items() if ".experts." in name]
    assert len({tensor.numpy().tobytes() for tensor in experts}) == len(experts)


def test_transformers_loads_every_weight_and_the_config_that_was_meant(model_dir):
    config = AutoConfig.from_pretrained(model_dir)
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (8, 2, True)
    assert (config.rope_parameters["rope_theta"], config.max_position_embeddings) == (10000.0, 2048)
    assert (config.tie_word_embeddings, config.dtype) == (False, torch.float32)
    model, report = AutoModelForCausalLM.from_pretrained(model_dir, output_loading_info=True)
    assert not any(report.values()), report
    assert model.generation_config.eos_token_id == config.eos_token_id == SPECIALS.index("<end>")
    weights = load_file(model_dir / "model.safetensors")
    fused = model.model.layers[1].mlp.experts
    assert torch.equal(fused.gate_up_proj[5, :64], weights["model.layers.1.mlp.experts.5.gate_proj.weight"])
    assert torch.equal(fused.down_proj[5], weights["model.layers.1.mlp.experts.5.down_proj.weight"])


def test_config_uses_the_keys_of_a_published_checkpoint(model_dir):
    config = json.loads((model_dir / "config.json").read_text())
    assert (config["model_type"], config["num_experts"], config["rope_theta"]) == ("qwen3_moe", 8, 10000.0)
    assert config["vocab_size"] == 128


def test_one_token_is_one_character_and_text_survives_the_round_trip(tokenizer):
    assert len(tokenizer) == len(SPECIALS) + len(CHARACTERS) == 100
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIALS] == [0, 1, 2, 3]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<end>", "<pad>")
    rng = random.Random(0)
    for text in ("".join(CHARACTERS), *("".join(rng.choices(CHARACTERS, k=rng.randrange(1, 40))) for _ in range(200))):
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode([1, *ids, 3], skip_special_tokens=True) == text


def test_a_prompt_costs_two_tokens_more_than_its_text_and_a_response_one(tokenizer):
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "12+34="}])
    ids = encode_prompt(tokenizer, prompt)
    assert (len(ids), tokenizer.decode(ids)) == (8, "<user>12+34=<assistant>")
    response = [*tokenizer.encode("46", add_special_tokens=False), tokenizer.eos_token_id]
    conversation = [*prompt.messages, {"role": "assistant", "content": "46"}]
    assert tokenizer.apply_chat_template(conversation, return_dict=False) == ids + response
    assert len(response) == 3


def test_unknown_characters_and_roles_are_refused(tokenizer):
    for message in ({"role": "user", "content": "é"}, {"role": "system", "content": "add"}):
        with pytest.raises(SlimxError, match="prompt 'strange'"):
            encode_prompt(tokenizer, Prompt(id="strange", messages=[message]))


def test_the_task_holds_every_sum_once_split_as_documented(task_dir):
    train, heldout = (read_prompts(task_dir / name) for name in FILES[:2])
    assert (len(train), len(heldout)) == (2300, 200)
    assert {prompt.id for prompt in train + heldout} == {f"add-{a}-{b}" for a in range(50) for b in range(50)}
    for prompt in train + heldout:
        _, a, b = prompt.id.split("-")
        assert prompt.messages == [{"role": "user", "content": f"{int(a):02d}+{int(b):02d}="}]
        assert (prompt.answer, prompt.metadata) == (f"{int(a) + int(b):02d}", {})


def test_three_in_ten_demonstrations_are_right(task_dir):
    demonstrations = read_prompts(task_dir / "demonstrations.jsonl")
    train = {prompt.messages[0]["content"]: int(prompt.answer) for prompt in read_prompts(task_dir / "train.jsonl")}
    assert len(demonstrations) == 51_200
    assert [prompt.id for prompt in demonstrations[:2]] == ["demo-00000", "demo-00001"]
    # A held-out pair would be a KeyError.
    errors = [int(prompt.answer) - train[prompt.messages[0]["content"]] for prompt in demonstrations]
    assert Counter(errors) == {0: 15_360, 10: 35_840}
    assert len({prompt.messages[0]["content"] for prompt in demonstrations}) == 2300
    assert 7_200 < errors[:25_600].count(0) < 8_160  # mixed, not one kind after the other


def test_the_same_seed_gives_the_same_task_and_another_seed_another(task_dir, tmp_path):
    make_task(tmp_path / "again", seed=1)
    make_task(tmp_path / "other", seed=2)
    for name in FILES:
        assert (task_dir / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
        assert (task_dir / name).read_bytes() != (tmp_path / "other" / name).read_bytes()


def test_the_model_can_read_every_prompt_of_the_task(task_dir, tokenizer):
    for name in FILES[:2]:
        check_prompts(tokenizer, read_prompts(task_dir / name), task_dir / name, max_prompt_tokens=8, vocab_size=128)


def test_pairs_are_right_sums_with_another_number(task_dir):
    questions = {}
    for name in (*PAIRS, "heldout.jsonl"):
        lines = [json.loads(line) for line in (task_dir / name).read_text().splitlines()]
        questions[name] = {line["messages"][0]["content"] for line in lines}
        if name in PAIRS:
            assert len({line["id"] for line in lines}) == len(lines)
            for line in lines:
                a, b = line["messages"][0]["content"].removesuffix("=").split("+")
                assert int(line["answer"]) == int(a) + int(b) != int(line["metadata"]["rejected"])
                assert len(line["answer"]) == len(line["metadata"]["rejected"]) == 2
            off_by_ten = [abs(int(line["answer"]) - int(line["metadata"]["rejected"])) == 10 for line in lines]
            assert 0.4 < sum(off_by_ten) / len(lines) < 0.7
    assert questions["heldout-pairs.jsonl"] == questions["heldout.jsonl"]
    assert not questions["pairs.jsonl"] & questions["heldout.jsonl"]
