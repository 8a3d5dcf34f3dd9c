"""The documentation does what it says: its files are planned or imported, the parts of files that it shows are valid,
its commands are executed as far as they need no GPU, network or minutes, and what they print is what a page shows."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import inspect
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import typer
import yaml
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer._click.exceptions import MissingParameter
from typer.core import TyperGroup

import slimx
from slimx import cli
from slimx.config.load import load_config
from slimx.config.schema import Config
from slimx.data.prompts.read import read_prompts
from slimx.data.records import Group, Prompt, Trajectory
from slimx.dotted import imported
from slimx.extras.quickstart.make_model import make_model
from slimx.extras.quickstart.make_task import make_task
from slimx.observability.tracking.names import METRICS
from slimx.orchestration.start.prepare import check_run
from slimx.rollout.draft import Draft
from slimx.rollout.hooks import RewardContext, RolloutContext
from tests.documents import COMMANDS, ELSEWHERE, LANGUAGES, PAGES, ROOT, Block, blocks, elsewhere, python_program, spans
from tools.docs import make_foreign
from tools.docs.typed import typed as run

KINDS = {
    "ctx": (RolloutContext, RewardContext),
    "draft": (Draft,),
    "group": (Group,),
    "prompt": (Prompt,),
    "trajectory": (Trajectory,),
}
"""Names of the documentation, with the classes that may be meant."""
AROUND = {
    "Case": "of tests/integration/family_cases.py",
    "LossInputs": "of slimx.algorithms",
    "answer": "the result of an agent",
    "found": "the results of a search",
    "np": "numpy",
    "shared_client": "of slimx.extras.agents.agent",
    "stock": "of tests/integration/family_cases.py",
    "torch": "torch",
}
"""Names that a part of a file does not define, each with whose it is."""

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
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
PROGRAM = typer.main.get_command(cli.app)
CLI_COMMANDS = {name: PROGRAM.get_command(None, name) for name in PROGRAM.list_commands(None)}
PLACEHOLDERS = {"FILE": "configs/moe/qwen3-30b-a3b-async-fp8.yaml", "DIR": "models/Qwen3-30B-A3B"}
"""Words that stand for a file or directory, each with one."""

EXECUTED = ("plan", "doctor", "from-slime", "from-trl", "from-verl", "init", "--version")
"""Commands of slimx that need neither weights nor minutes."""
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
BASE = {"run": {"dir": "r"}, "model": {"path": "m"}, "rollout": {"prompts": "p"}, "checkpoint": {"every": 20}}
"""The run that a part of a page is added to."""
INSIDE = {"box": "rollout.options.toolbox_options", "options": "rollout"}
"""Keys that a page shows without those around them, with these."""
TOOLS, TOOLBOX = "tools", "terminal"
"""Hook and toolbox of a part that shows toolbox_options alone."""


def wrong_names(text: str) -> Iterator[str]:
    """Yields the names of a text that nothing defines. Raises SyntaxError if it is no Python, with `await` at its top
    level, and ImportError or AttributeError if an import of slimx fails."""
    text = f"{{{text}}}" if text.startswith('"') else text
    compile(text, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    nodes = [*ast.walk(ast.parse(text))]
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slimx"):
            module = importlib.import_module(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            kinds = KINDS.get(node.value.id, ())
            if kinds and not any(node.attr in {*dir(kind), *kind.__annotations__} for kind in kinds):
                yield f"{node.value.id}.{node.attr}"
    known = bound | set(dir(builtins)) | set(dir(slimx)) | KINDS.keys() | AROUND.keys()
    yield from (node.id for node in nodes if isinstance(node, ast.Name) and node.id not in known)


def shown(text: str) -> list[list[str]]:
    """Returns the lines of its output that a console block shows of each command."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append([])
        else:
            found[-1].append(line)
    return found


def try_command(words: Sequence[str], *, parse_only: bool) -> tuple[int, str] | None:
    """Returns exit status and output of a command in the working directory, a desk; None if it is tried without output.

    Those of `EXECUTED` are executed unless `parse_only`; of `train`, `generate` and `eval` all
    checks before the start, or the plan where the model has no weights. The options of every other command of slimx
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
    if not parse_only and (name in EXECUTED or source is not None and Path(source).is_file()):
        return run(arguments)
    if name.startswith("--"):
        assert [option for option in PROGRAM.params if name in option.opts], name
        return None
    command = CLI_COMMANDS[name]
    if isinstance(command, TyperGroup):
        if not rest:
            return None
        command, rest = command.commands[rest[0]], rest[1:]
    numbers = ["1" if word == "N" else word for word in rest]
    with contextlib.suppress(MissingParameter):  # a name alone speaks of the command
        command.make_context(name, numbers)
    return None


def _try_pip(arguments: list[str]) -> None:
    if arguments[0] == "wheel" or arguments[-1].endswith(".whl"):
        return  # tests/extras/install/test_wheel.py does both
    extras = re.findall(r"slimx\[(\w+)\]", " ".join(arguments))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*extras} <= project["optional-dependencies"].keys(), arguments
    pins = [word for word in arguments if "==" in word]
    lock = (ROOT / "requirements/cu130.txt").read_text()
    found = [re.search(rf"^{pin.replace('==', '(-cu13)?==')}\b", lock, re.MULTILINE) for pin in pins]
    assert (extras or pins) and all(found), arguments


def missing(shown: list[str], output: str) -> str | None:
    """Returns the first line of a page that an output does not have where it should; None: it has all. `...` stands for
    any text within a line, and alone for any lines."""
    lines = [line.rstrip() for line in output.splitlines()]
    gap = False
    for line in shown:
        if line.strip() == "...":
            gap = True
            continue
        pattern = re.compile(".*".join(map(re.escape, line.rstrip().split("..."))))
        fitting = [number for number, text in enumerate(lines) if pattern.fullmatch(text)]
        if not fitting or (fitting[0] > 0 and not gap):
            return line
        del lines[: fitting[0] + 1]
        gap = False
    return None if gap or not lines else f"(the page ends before) {lines[0]}"


def lay_out(desk: Path) -> None:
    """Puts on the desk what a reader has: the repository's folders, models without weights, and data as published."""
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
    shutil.copytree(made / "model", desk / "runs" / "agents" / "data" / "model")  # made by make.py
    (desk / "compute_score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'sums': 1.0}[data_source] * (solution_str.strip() == ground_truth)\n"
    )
    (desk / "rewards.py").write_text(
        "def right(completions, answer, **kwargs):\n"
        "    return [float(said[-1]['content'] == wanted) for said, wanted in zip(completions, answer)]\n"
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each byte, and Qwen's special tokens with their ids."""
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


@pytest.fixture(scope="module")
def made_desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("desk")
    lay_out(directory)
    return directory


@pytest.fixture
def desk(made_desk: Path, monkeypatch: pytest.MonkeyPatch):
    """The directory in which a reader works."""
    monkeypatch.chdir(made_desk)
    monkeypatch.syspath_prepend(str(made_desk))
    monkeypatch.setenv("BOXES_TOKEN", "b")
    before = set(sys.modules)
    yield made_desk
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(made_desk)):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_right(page: str, desk: Path) -> None:
    found = blocks(page)
    assert [block.name for block in found if block.language not in LANGUAGES] == []
    files = {block.file: block for block in found if block.file}
    for name, block in files.items():
        (desk / name).write_text(block.text)
    for block in found:
        if block.language == "console":
            for words, lines in zip(block.commands(), shown(block.text), strict=True):
                if (done := try_command(words, parse_only="FILE" in words)) is None:
                    continue
                refused = any(line.startswith("slimx: ") for line in lines)
                assert done[0] == (2 if refused else 0), (words, done)
                assert (lacking := missing(lines, done[1])) is None, f"{words}: shown is {lacking!r} of\n{done[1]}"
        elif block.language == "bash":
            done = [(words, try_command(words, parse_only=False)) for words in block.commands()]
            assert [row for row in done if row[1] is not None and row[1][0] != 0] == []
        elif block.file is None:
            check_part(block)
    for name, block in files.items():
        if name.endswith(".py") and "from trl import" not in block.text:
            importlib.import_module(name.removesuffix(".py"))
        elif name.endswith(".yaml"):
            assert try_command(["slimx", "plan", name], parse_only=False)[0] == 0, name


def check_part(block: Block) -> None:
    """Fails unless a part of a file is valid."""
    if block.language == "python":
        assert [*wrong_names(block.text)] == [], block.name
    elif block.language == "json" and block.text.count("\n{") + 1 == len(block.text.splitlines()):
        Path("lines.jsonl").write_text(block.text)
        assert len(read_prompts("lines.jsonl")) == len(block.text.splitlines())
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        part = yaml.safe_load(block.text)
        for place in {INSIDE[key] for key in part if key not in Config.model_fields}:
            for key in reversed(place.split(".")):
                part = {key: part}
        base = BASE if "sources" not in part.get("rollout", {}) else BASE | {"rollout": {}}
        Path("part.yaml").write_text(OmegaConf.to_yaml(OmegaConf.merge(base, OmegaConf.create(part))))
        check_options(load_config(Path("part.yaml"), []))


def check_options(config: Config) -> None:
    """Raises TypeError or slimx's refusal unless a hook and a toolbox of slimx take their options."""
    options = config.rollout.options
    tools = options.get("toolbox_options", {})
    generate = TOOLS if tools else config.rollout.generate
    if tools or "generate" in config.rollout.model_fields_set and generate.startswith("slimx."):
        inspect.signature(imported("rollout.generate", generate, "slimx.generate")).bind_partial(**options)
    toolbox = options.get("toolbox", TOOLBOX)
    if toolbox.startswith("slimx."):
        imported("rollout.options.toolbox", toolbox, "slimx.toolboxes")(**tools)


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_sentences_of_a_page_can_be_typed(page: str, desk: Path) -> None:
    for words in spans(page):
        try_command(words, parse_only=True)


def test_every_exception_occurs_in_a_page() -> None:
    assert {elsewhere(words) for words in COMMANDS} - {None} == ELSEWHERE.keys()
    code = "".join(block.text for page in PAGES for block in blocks(page) if block.language == "python")
    assert [name for name in AROUND if not re.search(rf"\b{name}\b", code)] == []


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_every_curve_that_a_guide_names_is_a_metric(page):
    sections = "|".join({metric.name.partition("/")[0] for metric in METRICS})
    known = [re.sub(r"\\{\w+\\}", "[^`]+", re.escape(metric.name)) for metric in METRICS]
    named = re.findall(rf"`((?:{sections})/[^`\s.]+)`", page.read_text())
    assert [name for name in named if not any(re.fullmatch(pattern, name) for pattern in known)] == []


def test_the_tables_of_foreign_names_are_those_that_refusals_use():
    assert make_foreign.PAGE.read_text() == make_foreign.page(), "run python -m tools.docs.make_foreign"


@pytest.mark.parametrize(
    ("shown", "lacking"),
    [
        (["a", "b 2", "c"], None),
        (["a", "..."], None),
        (["...", "c"], None),
        (["a", "b ...", "c"], None),
        (["a", "b"], "b"),
        (["a", "c"], "c"),
        (["b 2", "..."], "b 2"),
        (["a"], "(the page ends before) b 2"),
    ],
)
def test_a_line_that_an_output_does_not_have_is_found(shown, lacking):
    assert missing(shown, "a\nb 2\nc\n") == lacking
