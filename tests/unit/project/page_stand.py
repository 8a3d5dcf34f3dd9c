"""A reader of the documentation at a desk: the files that a reader has, and commands typed as a page shows them."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer._click.exceptions import MissingParameter
from typer.core import TyperGroup

from slimx import cli
from slimx.config.load import load_config
from slimx.orchestration.start.prepare import check_run
from tests.documents import ROOT
from tools.docs.typed import typed as run
from tools.quickstart.make_model import make_model
from tools.quickstart.make_task import make_task

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REPOSITORY = r"(benchmarks|configs|docs|examples|scripts|slimx|tests|tools)/[\w./-]+\.\w+$"
"""Words that name a file of the repository."""
QUESTIONS = {"train": 7473, "test": 1319}
"""Rows of GSM8K's two files."""
ROWS = 256
"""Rows of a file of the quickstart's task."""


ELSEWHERE = {
    "build/hubs/verifiers/bin/python": "is made by make hubs",
    "git clone": "needs a network",
    "hf download": "needs a network",
    "kubectl create": "needs a Kubernetes cluster",
    "ln -s": "links files that git clone brings",
    "pip check": "takes a minute of CPU time and is no part of slimx",
    "python -m nltk.downloader": "needs a network",
    "python -m slimx.engines.server.launch": "parses SGLang's options after importing SGLang",
    "python3 -m verl.trainer.main_ppo": "starts verl",
    "python3 train.py": "starts slime",
    "ray status": "needs a Ray cluster",
}
"""Beginnings of commands that are not tried, each with the reason."""
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
PROGRAM = typer.main.get_command(cli.app)
COMMANDS = {name: PROGRAM.get_command(None, name) for name in PROGRAM.list_commands(None)}
PLACEHOLDERS = {"FILE": "configs/moe/qwen3-30b-a3b-async-fp8.yaml", "DIR": "models/Qwen3-30B-A3B"}
"""Words that stand for a file or directory, each with one."""


def shown(text: str) -> list[list[str]]:
    """The lines of its output that a console block shows of each command."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append([])
        else:
            found[-1].append(line)
    return found


def elsewhere(words: Sequence[str]) -> str | None:
    """The key of ELSEWHERE that a command begins with; None: it is tried."""
    return next((key for key in ELSEWHERE if " ".join(words).startswith(key)), None)


def python_program(words: Sequence[str]) -> list[str] | None:
    """Arguments of Python for a program of the repository; None: the command is something else."""
    if not Path(words[0]).name.startswith("python") or elsewhere(words) or words[1:3] == ["-m", "pytest"]:
        return None
    return list(words[1:])


def try_command(words: Sequence[str], *, parse_only: bool) -> tuple[int, str] | None:
    """Exit status and output of a command in the working directory, a desk; None if it is tried without output.

    `slimx plan`, `doctor` and `--version` are executed unless `parse_only`; of `train`, `generate` and `eval` all
    checks before the start, or the plan where the model has no weights. Of every other command of slimx the options
    are parsed. A target, file, extra, or test of another program must exist. Raises AssertionError or slimx's refusal.
    """
    program, *arguments = (re.sub("(FILE|DIR)$", lambda found: PLACEHOLDERS[found[0]], word) for word in words)
    program = Path(program).name if program.startswith(".venv/bin/") else program
    missing_files = [
        word for word in arguments if re.match(REPOSITORY, word) and "NAME" not in word and not (ROOT / word).exists()
    ]
    assert not missing_files, missing_files
    if elsewhere(words) or python_program(words):
        pass
    elif program == "slimx":
        return _try_slimx(arguments, parse_only)
    elif program == "make":
        names = [word.partition("=") for word in arguments]
        assert {name for name, sign, _ in names if not sign} <= TARGETS, arguments
        assert all(re.search(rf"\b{name}\b", MAKEFILE) for name, sign, _ in names if sign), arguments
    elif program == "pip":
        _try_pip(arguments)
    elif program == "python":
        files = [word for word in arguments if word.startswith("tests/")]
        expressions = [text for option, text in pairwise(arguments) if option == "-k"]
        assert files and all(text in Path(ROOT / file).read_text() for file in files for text in expressions), words
    else:
        assert program == "sbatch" or program.startswith("scripts/"), f"{program}: no program that this test knows"
        script = arguments[0] if program == "sbatch" else program
        assert [*ROOT.glob(script)], script
    return None


def _try_slimx(arguments: list[str], parse_only: bool) -> tuple[int, str] | None:
    name, *rest = arguments
    if name in ("train", "generate", "eval") and not parse_only:
        files = [word for word in rest if not word.startswith("--")]
        config = load_config(files[0], files[1:])
        if any(Path(config.model.path).glob("*.safetensors")):
            check_run(config)
            return None
        return run(["plan", *files])
    follows = dict(pairwise(rest))
    source = follows.get("--from", follows.get("check")) if name == "data" else None
    if not parse_only and (name in ("plan", "doctor", "--version") or source is not None and Path(source).is_file()):
        return run(arguments)
    if name == "--version":
        return None
    command = COMMANDS[name]
    if isinstance(command, TyperGroup):
        if not rest:
            return None
        command, rest = command.commands[rest[0]], rest[1:]
    numbers = ["1" if word == "N" else word for word in rest]
    with contextlib.suppress(MissingParameter):  # a name alone speaks of the command
        command.make_context(name, numbers)
    return None


def _try_pip(arguments: list[str]) -> None:
    extras = re.findall(r"slimx\[(\w+)\]", " ".join(arguments))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*extras} <= project["optional-dependencies"].keys(), arguments
    pins = [word for word in arguments if "==" in word]
    lock = (ROOT / "requirements/cu130.txt").read_text()
    found = [re.search(rf"^{pin.replace('==', '(-cu13)?==')}\b", lock, re.MULTILINE) for pin in pins]
    assert (extras or pins) and all(found), arguments


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
    for folder in ("configs", "docs", "examples", "scripts"):
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
    make_task(made)
    for rows in made.glob("*.jsonl"):  # a check of every row costs seconds for each command
        rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:ROWS]))
    for run_name in ("quickstart-sft", "quickstart-rm"):  # their runs export it
        shutil.copytree(made / "model", desk / "runs" / run_name / "hf")
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
