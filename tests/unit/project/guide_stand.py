"""A reader of docs/guides at a desk: the files that a reader has, and commands typed as a page shows them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slimx import cli
from tests.documents import ROOT
from tools.docs.typed import typed as run
from tools.quickstart.make_model import make_model

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTIONS = {"train": 7473, "test": 1319}
"""Rows of GSM8K's two files."""


ELSEWHERE = {
    "hf": "needs a network",
    "git": "needs a network",
    "ln": "of what git has brought",
    "python3": "starts slime, verl or TRL, which their users have",
}
"""Programs of the guides that no test starts."""


def commands(text: str) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines that the page shows of its output."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def typed(command: str) -> tuple[int, str]:
    """Exit status and output of a `slimx` command, run here."""
    program, *arguments = shlex.split(command)
    assert program == "slimx" and arguments[0] in ("plan", "data", "doctor", "--version"), command
    return run(arguments)


def asked_of(text: str) -> list[list[str]]:
    """Words of each command of a block that shows no output, without comments."""
    return [words for line in text.replace("\\\n", " ").splitlines() if (words := shlex.split(line, comments=True))]


def could_run(words: list[str]) -> bool:
    """True if a command that needs minutes, a GPU, a run or a network is written right: a run that can be planned,
    options that the command takes, a script that is there. AssertionError for a program that nobody knows."""
    program, *arguments = words
    if program == "slimx" and arguments[0] in ("train", "eval", "generate"):
        return run(["plan", *arguments[1:]])[0] == 0
    if program == "slimx":
        command = typer.main.get_command(cli.app).commands[arguments[0]]
        command.make_context(arguments[0], arguments[1:])  # raises for an option that it does not have
        return True
    if program == "sbatch":
        return Path(arguments[0]).is_file() and all(Path(name).exists() for name in arguments[1:])
    if program.startswith("scripts/"):
        return os.access(program, os.X_OK) and all(Path(name).exists() for name in arguments)
    assert program in ELSEWHERE, program
    return True


def missing(shown: list[str], said: str) -> str | None:
    """The first line of a page that an output does not have where it should; None: it has all. `...` stands for any
    text within a line, and alone for any lines."""
    lines = [line.rstrip() for line in said.splitlines()]
    gap = False
    for line in shown:
        if line.strip() == "...":
            gap = True
            continue
        pattern = re.compile(".*".join(map(re.escape, line.rstrip().split("..."))))
        fitting = [number for number, each in enumerate(lines) if pattern.fullmatch(each)]
        if not fitting or (fitting[0] > 0 and not gap):
            return line
        del lines[: fitting[0] + 1]
        gap = False
    return None if gap or not lines else f"(the page ends before) {lines[0]}"


def lay_out(desk: Path) -> None:
    """Put on the desk what a reader has: the repository's folders, models without weights, and data as published."""
    for folder in ("configs", "examples", "scripts"):
        (desk / folder).symlink_to(ROOT / folder)
    for source in ("recipes/models/Qwen2.5-0.5B-Instruct", "moe/models/Qwen3-30B-A3B"):
        shutil.copytree(ROOT / "configs" / source, desk / "models" / Path(source).name)
    _tokenizer().save_pretrained(desk / "models" / "Qwen2.5-0.5B-Instruct")
    (desk / "gsm8k").mkdir()
    for split, count in QUESTIONS.items():
        rows = [
            {"question": f"Ann has {n} pens and buys {n} more. How many?", "answer": f"{n} + {n}.\n#### {2 * n}"}
            for n in range(1, count + 1)
        ]
        (desk / "gsm8k" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    verl = {"prompt": [{"role": "user", "content": "1+1="}], "data_source": "sums"}
    table = pyarrow.Table.from_pylist([verl | {"reward_model": {"ground_truth": "2", "style": "rule"}}])
    (desk / "data").mkdir()
    for split in QUESTIONS:
        pyarrow.parquet.write_table(table, desk / "data" / f"{split}.parquet")
    made = desk / "runs" / "quickstart-data"
    make_model(made / "model", seed=1)
    for name in ("train", "heldout"):
        prompt = {"messages": [{"role": "user", "content": "12+34="}], "answer": "46"}
        (made / f"{name}.jsonl").write_text(json.dumps(prompt) + "\n")
    (desk / "compute_score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'sums': 1.0}[data_source] * (solution_str.strip() == ground_truth)\n"
    )
    (desk / "rewards.py").write_text(
        "def right(completions, answer, **kwargs):\n"
        "    return [float(said[-1]['content'] == wanted) for said, wanted in zip(completions, answer)]\n"
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and Qwen's special tokens with their ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
    vocabulary = {letter: number for number, letter in enumerate(alphabet)} | specials
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(list(specials))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = CHAT
    return made
