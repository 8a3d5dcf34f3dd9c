"""Scripts have the meaning that bash gives them: every snippet is read, and run by bash with a program that prints its
arguments."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slimx.extras.foreign.scripts.shell.expansion import shown
from slimx.extras.foreign.scripts.shell.script import Shell, commands_of
from tests.refusals import refused

RUNNER = r"""
prog() { printf '%s\0' prog "$@"; printf '\1\0'; }
export -f prog
snippets=("$@")
set --
for snippet in "${snippets[@]}"; do (eval "$snippet") 2>/dev/null </dev/null; printf '\2'; done
"""
FILE = Path(__file__).parent / "scripts" / "snippets.txt"
PARTS = [part.partition("\n") for part in FILE.read_text().split("### ")[1:]]
SNIPPETS = {name: text for name, _, text in PARTS}


@pytest.fixture(scope="module")
def of_bash() -> dict[str, list[list[str]]]:
    """Returns the commands that bash runs, by snippet."""
    command = ["bash", "-c", RUNNER, "bash", *SNIPPETS.values()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin"}, check=True)
    commands = [
        [words.split("\0")[1:-1] for words in output.split("\1\0")[:-1]] for output in ran.stdout.split("\2")[:-1]
    ]
    return dict(zip(SNIPPETS, commands, strict=True))


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_script_is_read_as_bash_runs_it(of_bash, name):
    commands = commands_of(Path("run.sh"), SNIPPETS[name], {})
    assert [words[1:] for words in commands if words[0] == "prog"] == of_bash[name] != []


@pytest.mark.parametrize(
    "script",
    [
        "A=xx; for i in $(seq 60); do A=$A$A; done",
        'L=(a b); for i in $(seq 60); do L+=("${L[@]}"); done',
        "while :; do while :; do while :; do A=1; done; done; done",
        "f0() { :; }\n" + "".join(f"f{i}() {{ f{i - 1}; f{i - 1}; }}\n" for i in range(1, 40)) + "f39",
        "prog $(seq 999999999)",
        "a0=1; " + " ".join(f"a{i}=a{i - 1}+a{i - 1};" for i in range(1, 60)) + " prog $((a59))",
        "A=" + "a" * 9000 + "; prog ${A##*b}",
        "A=" + "a" * 3000 + "; for i in $(seq 9); do A=${A#*b}; done",
        'E=\'E="$E $E"; eval "$E"\'; eval "$E"',
        "for ((;1;)); do A=1; done",
        "A=" + "a" * 100_000 + "; for i in $(seq 500); do : ${#A}; done",
        "A=" + "a" * 10_000 + "; case $A in " + "b) ;; " * 3000 + "esac",
        "".join(f"A{i}=1;" for i in range(2000)) + "for i in $(seq 2000); do (:); done",
        "L=($(seq 3000)); for i in $(seq 400); do L+=(); done",
    ],
)
def test_a_script_that_repeats_or_grows_without_end_is_refused(script):
    with refused("foreign.endless", about="run.sh"):
        commands_of(Path("run.sh"), script, {})


@pytest.mark.parametrize(
    "script",
    [
        "f() { f; }; f",
        "a=a; prog $((a))",
        "prog $((" + "(" * 3000 + "1" + ")" * 3000 + "))",
        "prog " + "$(" * 1000 + "echo a" + ")" * 1000,
        "true" + " && true" * 3000,
        'E=\'eval "$E"\'; eval "$E"',
    ],
)
def test_a_script_that_nests_too_deeply_is_refused(script):
    with refused("foreign.nesting", about="run.sh"):
        commands_of(Path("run.sh"), script, {})


@pytest.mark.parametrize(
    "script",
    [
        "while true; do curl -sf localhost && break; sleep 5; done",
        "while true; do if curl -sf localhost; then break; fi; sleep 5; done",
        "while true; do case $(curl -sf localhost) in up) break ;; esac; done",
        "until curl -sf localhost; do sleep 5; done",
        "while true; do sleep 5; done",
        "A=" + "a" * 40 + "; [[ $A =~ (a+)+$b ]]; [[ $A =~ a*a*a*a*a*a*c ]]; [[ a =~ [ ]]",
        "A=" + "a" * 900 + "; case $A in " + "*a" * 90 + "*b) prog ;; esac; A=${A%*a*a*a*a*b}",
        "A=$((1 << 9999999999)) B=$((9 ** 9 ** 9)); printf '%999999999d' 1; shift x; shift 99999999999",
        f"shift {'9' * 5000}; : {{1..{'9' * 5000}}} $(({'9' * 5000})); declare -A M; M[{'9' * 5000}]=1; M+=(a)",
        f"A={'a' * 28}; [[ $A =~ {'a?' * 28}{'a' * 28} ]]; [[ $A =~ a{{99999999999}} ]]",
        "A=\ue0015\ue002; prog $A; eval $A \ue0017\ue002 \ue000x",
        "source "
        + "a" * 9000
        + "; [ -f "
        + "b/" * 9000
        + " ]; L[99999999999999]=1; : ${L[-1]} ${L:99999999999999999999}",
    ],
)
def test_a_script_cannot_make_its_reading_take_long(script):
    shell = Shell(Path("run.sh"), {})
    effort = shell.effort
    shell.run(f"{script}\nprog end")
    assert shell.commands[-1] == ["prog", "end"] and effort - shell.effort < 1_000_000


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("prog x{a,b} {1..3}", ["$x{a,b}", "${1..3}"]),
        ("for i in {1..3}; do prog $i; done", ["${1..3}"]),
        ("for i in $(date); do L+=(--a $i); done; prog ${L[@]}", ["--a", "$(date)"]),
        ("A=1; read -r A B <<< 'a b'; prog $A", ["$read -r A B"]),
        ('A=1; while read -r x; do A+=" $x"; done <<< b; prog $A', ["1", "$read -r x"]),
        ("A=abc; prog ${A:1:2}", ["$${A:1:2}"]),
        (
            "A=a; printf -v B '%d' 1; prog ${A/a/b} ${A//a} x$(printf %d 1) $B",
            ["$${A/a/b}", "$${A//a}", "x$(printf %d 1)", "$printf -v B %d 1"],
        ),
        ('A=B; L=(1); prog "${!A}" "${!L[@]}"', ["$${!A}", "$${!L[@]}"]),
        ("[[ v12 =~ ([0-9]+) ]] && A=1; prog ${BASH_REMATCH[1]}", ["$BASH_REMATCH"]),
        (
            "prog $((1 ? 2 : 3)) $((5 & 4)) $((~5)) $((8 >> 1)) $((2**3)) $((1 < 2 == 1))",
            ["$((1 ? 2 : 3))", "$((5 & 4))", "$((~5))", "$((8 >> 1))", "$((2**3))", "$((1 < 2 == 1))"],
        ),
        (
            "prog $((010)) $((True)) $((16#ff)) $((9223372036854775807 + 1)) $((NOT_SET[3]))",
            ["$((010))", "$((True))", "$((16#ff))", "$((9223372036854775807 + 1))", "$((NOT_SET[3]))"],
        ),
        ("x=4; prog $((--x)) $x; L=(3 4)", ["$((--x))", "$((--x))"]),
        ("declare -i N=2+3; N+=1; prog $N; declare -u U=a", ["$N"]),
        ('f() { local -n r=$1; r+=(z); }; L=(a b); f L; prog "${L[@]}"', ["$L"]),
        ('mapfile -t L < x; prog "${L[@]}" ${#L[@]} ${L[1]:-2}', ["$mapfile -t L", "$#L", "$mapfile -t L"]),
        ("IFS=, read -ra G <<< 0,1; prog ${#G[@]} ${G[1]}", ["$#G", "$read -ra G"]),
        ("A=abc; prog ${A^^[ab]} ${A##@(a|b)} ${A%[[:alpha:]]}", ["$${A^^[ab]}", "$${A##@(a|b)}", "$${A%[[:alpha:]]}"]),
        ("prog $((NODES * 2)) $(basename -s .sh a.sh)", ["$NODES", "$(basename -s .sh a.sh)"]),
        ("L=(3 4); unset L[1]; A=1; [ a = a -a b = b ] && A=2; prog ${L[@]} $A", ["$unset L[1]", "1"]),
        ("L=(3); ((L[0] += 1)); prog ${L[0]}", ["$((L[0] += 1))"]),
        ("x=1 y=2 z=3; ((x &= 5, ++y)); prog $x $y $z", ["$((x &= 5, ++y))", "$((x &= 5, ++y))", "3"]),
        ("x=1; ((x = $(nproc))); prog $x", ["$((x = $(nproc)))"]),
        ("prog \"$(echo -e 'a\\x41')\"", ["$(echo -e 'a\\x41')"]),
        ('X="--a $NOPE --b"; prog $X', ["--a", "$NOPE", "--b"]),
    ],
)
def test_what_is_not_computed_stays_marked(script, words):
    (command,) = [words for words in commands_of(Path("run.sh"), script, {}) if words[0] == "prog"]
    assert list(map(shown, command[1:])) == words


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ('A=1\nprog "x\n', 2),
        ("if true; then\n prog 1\n", 1),
        ("A=1\nB=2\nprog $(echo\n", 3),
        ("prog a\nA=(1\n", 2),
        ("prog <node1> <node2>\n", 1),
        ("f() {\n prog <a> <b>; }\nf", 2),
    ],
)
def test_wrong_syntax_is_told_with_its_line(script, line):
    with refused("foreign.syntax", about=f"line {line}"):
        commands_of(Path("run.sh"), script, {})


def test_wrong_syntax_in_a_part_that_is_not_run_does_not_matter():
    wrong = 'prog "${A:-{\\"a\\": 1}}"'  # it is correct, but unknown to the grammar
    text = f"f() {{ {wrong}; }}\nif false; then\n {wrong}\nfi\nprog 1"
    assert commands_of(Path("run.sh"), text, {}) == [["prog", "1"]]


def test_wrong_syntax_is_told_with_the_file_that_has_it(tmp_path: Path):
    (tmp_path / "models.sh").write_text('A=1\nB=("x\n')
    with refused("foreign.syntax", about="line 2") as caught:
        commands_of(Path("run.sh"), f"\n\n\nsource {tmp_path}/models.sh\n", {})
    assert f"{tmp_path}/models.sh" in str(caught.value)
