"""Launch scripts are read without being run: variables, arrays, conditions and files that they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimx.extras.foreign.scripts.python_file import arguments_in
from slimx.extras.foreign.scripts.shell.expansion import COMPUTED, END, unknown_in
from slimx.extras.foreign.scripts.shell.options import flags_of, keys_of, launch_of
from slimx.extras.foreign.scripts.shell.script import commands_of
from tests.refusals import refused

SCRIPT = r"""#!/bin/bash
set -ex
pkill -9 python  # never run
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/models/tiny.sh"
COUNT=$(nvidia-smi -L | wc -l)
if [ "$COUNT" -gt 0 ]; then FAST=1; else FAST=0; fi
SIZE=${SIZE:-4}
NAME=tiny-$((SIZE * 2))
DATA=(
   --prompt-data "${ROOT:-/data}/train set.jsonl"
   # --rollout-shuffle
   --batches 1 2 $(seq 4 2 8)
)
case "${MODE:-sync}" in
    async) DATA+=(--late) ;;
    sync|plain) DATA+=(--early "${NAME,,}") ;;
    *) echo "unknown"; exit 1 ;;
esac
[ -n "${EXTRA:-}" ] && DATA+=(--extra "$EXTRA")
[[ "$SIZE" -gt 2 && -z "${NONE:-}" ]] && WIDE=(--wide) || WIDE=()
for worker in a b; do
  ssh "$worker" "ray start"
done
cat > note.txt <<'END'
python3 train.py --from-a-document 1
END
launch() {
  ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="{\"a\": \"$FAST\"}" \
    -- python3 -u train.py "$@" ${MODEL_ARGS[@]} "${DATA[@]}" ${WIDE[@]} 2>&1 | tee log.txt
}
launch --first "$SIZE" --rate=-1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text("LAYERS=3\nMODEL_ARGS=(\n --num-layers $LAYERS\n --swiglu\n)\n")
    return tmp_path


def flags_in(folder: Path, text: str, **given: str) -> dict[str, list[str]]:
    launch = launch_of(commands_of(folder / "run.sh", text, given), lambda word: word == "train.py")
    assert launch is not None
    return flags_of(launch.arguments)


def test_a_script_is_read_as_a_shell_would_run_it(folder):
    assert flags_in(folder, SCRIPT) == {
        "first": ["4"],
        "rate": ["-1"],
        "num_layers": ["3"],
        "swiglu": [],
        "prompt_data": ["/data/train set.jsonl"],
        "batches": ["1", "2", "4", "6", "8"],
        "early": ["tiny-8"],
        "wide": [],
    }


def test_variables_that_the_user_gives_replace_those_of_the_script(folder):
    flags = flags_in(folder, SCRIPT, SIZE="2", MODE="async", EXTRA="x y", ROOT="/mine")
    assert flags["prompt_data"] == ["/mine/train set.jsonl"] and flags["extra"] == ["x y"]
    assert "late" in flags and "wide" not in flags and flags["first"] == ["2"]


def test_nothing_of_a_script_is_run(folder):
    target = folder / "made"
    text = f"touch {target}; X=$(touch {target}); X=`touch {target}`\npython train.py --a $X\n"
    flags_in(folder, text)
    assert not target.exists()


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("$(probe 2>/dev/null || echo gpu)", "gpu"),
        ("~/data", "~/data"),
    ],
)
def test_expansions_have_the_values_of_a_shell(folder, word, value):
    assert flags_in(folder, f"python train.py --a {word}\n") == {"a": [value]}


def test_flags_after_a_missing_backslash_are_read(folder):
    assert flags_in(folder, "python train.py --a 1\n --b 2 \\\n --c 3\n") == {"a": ["1"], "b": ["2"], "c": ["3"]}


@pytest.mark.parametrize(
    ("text", "program", "flags"),
    [
        ("python train.py --a 1\ncp train.py /x\necho python train.py --a 3", "train.py", {"a": ["1"]}),
        ("python x/train.py --a 1 --b 2\npython y/train.py --c 3", "x/train.py", {"a": ["1"], "b": ["2"]}),
        ("for i in 1 2; do python train.py --a $i; done", "train.py", {"a": ["2"]}),
        ("./train.py --a 1", "./train.py", {"a": ["1"]}),
        ('ssh h "rm train.py"; $PYTHON -u train.py --a 1', "train.py", {"a": ["1"]}),
        ("srun -N 2 bash -c 'cd x && torchrun --nproc 8 train.py --a 1'", "train.py", {"a": ["1"]}),
        ("cat > run2.sh <<END\npython train.py --a \\$1\nEND\nbash run2.sh 4", "train.py", {"a": ["4"]}),
        (
            "echo A=1 > e.sh; echo B=2 >> e.sh; date >> e.sh; . e.sh; python train.py --a $A --b $B",
            "train.py",
            {"a": ["1"], "b": ["2"]},
        ),
        ('A="--a 1 \\\r\n--b 2"\r\npython train.py $A\r\n', "train.py", {"a": ["1"], "b": ["2"]}),
        ("python train.py --a 1 \\\n  # --b 2 \\\n  --c 3", "train.py", {"a": ["1"], "c": ["3"]}),
        ("mkdir -p x && cd x && python train.py --a 1 || exit 1", "train.py", {"a": ["1"]}),
        ("if [ -z $GIVEN ]; then echo usage; exit 1; fi; python train.py --a 1", "train.py", {"a": ["1"]}),
        ("if nvidia-smi; then A=1; else A=2; fi; python train.py --a $A", "train.py", {"a": ["2"]}),
        ("nvidia-smi && python train.py --b; python train.py --a $(nproc || echo 4)", "train.py", {"a": ["4"]}),
        ("while true; do ray status | grep -q GPU && break; done; python train.py --a 1", "train.py", {"a": ["1"]}),
    ],
)
def test_the_launch_is_the_command_that_starts_the_program(folder, text, program, flags):
    commands = commands_of(folder / "run.sh", text, {})
    launch = launch_of(commands, lambda word: Path(word).name == "train.py", ("a", "b"))
    assert launch is not None and launch.program == program and flags_of(launch.arguments) == flags


@pytest.mark.parametrize(
    "text", ["cp grpo.py train.py", "echo train.py", "vim train.py", "echo 'python train.py --a 1'"]
)
def test_a_command_that_only_names_the_program_is_no_launch(folder, text):
    assert launch_of(commands_of(folder / "run.sh", text, {}), lambda word: word == "train.py") is None


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("$(date)", "(date)"),
        ("`date`", "(date)"),
        ("$(cat x | wc -l)", "(cat x | wc -l)"),
        ("$((2 * $(nproc)))", "((2 * $(nproc)))"),
        ("${GIVEN}", "GIVEN"),
        ("$((2 * $GIVEN))", "GIVEN"),
        ("${GIVEN:?is needed}", "GIVEN"),
        ("${GIVEN%/*}", "GIVEN"),
        ("${#GIVEN_TEXT[@]}$(date)", "(date)"),
        ("$(echo $GIVEN)", "GIVEN"),
    ],
)
def test_a_value_that_is_not_known_stays_marked(folder, word, value):
    assert unknown_in(commands_of(folder / "run.sh", f"python train.py {word}", {})[0][2]) == [value]


def test_overrides_of_hydra_are_read_without_their_signs():
    words = ["+a.b=1", "++c-x=[1,2]", "~d", "e='x y'", "--config-name=z", "f"]
    assert keys_of(words) == ({"a.b": "1", "c-x": "[1,2]", "d": "null", "e": "'x y'"}, ["--config-name=z", "f"])


def test_a_quote_that_is_never_closed_is_named_with_its_line(folder):
    with refused("foreign.syntax", about="line 2"):
        commands_of(folder / "run.sh", 'A=1\nB="x\n', {})


def test_arguments_of_python_are_read_without_running_the_file():
    text = """
from rewards import right, long as length
from trl import GRPOConfig, GRPOTrainer
RATE = 2e-6
data = load_dataset("owner/set", "main", split="train")
settings = GRPOConfig(output_dir="out", learning_rate=RATE, use_vllm=True, num_generations=4, seed=int("3"))
GRPOTrainer(model="owner/model", reward_funcs=[right, length, local], args=settings, train_dataset=data).train()
raise SystemExit
"""
    assert arguments_in(Path("grpo.py"), text) == {
        "trainer": ["GRPOConfig"],
        "output_dir": ["out"],
        "learning_rate": ["2e-06"],
        "use_vllm": ["True"],
        "num_generations": ["4"],
        "model_name_or_path": ["owner/model"],
        "reward_funcs": ["rewards.right", "rewards.length", "grpo.local"],
        "dataset_name": ["owner/set"],
        "dataset_config": ["main"],
        "dataset_train_split": ["train"],
        "seed": [f"{COMPUTED}int('3'){END}"],
    }
    text = """
from trl import GRPOConfig, GRPOTrainer
from mine import right
LR: float = 3e-6
N = 4
if fast:
    N = 8
more = dict(beta=0.1, num_generations=N)
args = GRPOConfig("out", learning_rate=LR, **more, **{"epsilon": 0.3})
args.max_completion_length = 77
GRPOTrainer("o/m", right, args, data).train()
"""
    assert arguments_in(Path("grpo.py"), text) == {
        "trainer": ["GRPOConfig"],
        "output_dir": ["out"],
        "learning_rate": ["3e-06"],
        "beta": ["0.1"],
        "epsilon": ["0.3"],
        "num_generations": [f"{COMPUTED}N{END}"],  # it has two values
        "max_completion_length": ["77"],
        "model_name_or_path": ["o/m"],
        "reward_funcs": ["mine.right"],
    }
    named = arguments_in(Path("x.py"), "load_dataset('o/n', name='sub')")
    assert (named["dataset_name"], named["dataset_config"]) == (["o/n"], ["sub"])
    with refused("foreign.not_python", about="x.py"):
        arguments_in(Path("x.py"), "def\n")
