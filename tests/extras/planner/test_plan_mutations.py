"""`slimx plan` answers every wrong configuration in seconds: a report or one sentence, exit code 0 or 2."""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import yaml

from slimx import cli
from slimx.config.schema import Config
from slimx.config.sections.objectives import OBJECTIVES
from tests.extras.planner.odd_values import NOT_NUMBERS, NUMBERS, ROOT, STRINGS, STRUCTURES, too_long

FILES = sorted((ROOT / "configs" / "moe").glob("*.yaml"))
SMALL = ("qwen3-30b", "quickstart")
MODELS = ["nowhere", "/dev/null", "/etc", "configs", "configs/moe", "configs/moe/kimi-k2.yaml", "http://x/y", ""]
TEXTS = [
    "run:\n\tname: x\n",
    "run: &a {dir: x}\nmodel: *b\n",
    "a: &a [*a]\n",
    "run: !!python/object/apply:os.getpid []\n",
    "run: !secret x\n",
    "run: {dir: x\n",
    "- a\n- b\n",
    "just text\n",
    "",
    "\x00",
    "\ufeffrun: {dir: x}\n",
    "run: {dir: x}\n---\nrun: {dir: y}\n",
    "? [a, b]\n: 1\n",
    "run: {dir: ${oc.env:SLIMX_NO_SUCH_VARIABLE}}\n",
    "run: {dir: ${run.dir}}\n",
    "run: {dir: ${}\n",
    "x: " + "[" * 2000 + "]" * 2000,
    "trainer: {world_size: " + "9" * 5000 + "}\n",
    "a: 2026-99-99\n",
    "a: 0x\nb: 0o9\nc: 1_000_\n",
    "<<: 1\n",
]


class Case(NamedTuple):
    """One wrong configuration."""

    what: str
    text: str
    overrides: list[str]


def case(seed: int, *, small: bool = False) -> Case:
    """Returns the mutation with number `seed`: one to three changes of a shipped configuration; `small`: of one
    whose plan takes a second or less."""
    draw = random.Random(seed)
    files = [file for file in FILES if file.stem.startswith(SMALL)] if small else FILES
    file = files[seed % len(files)]
    values = yaml.safe_load(file.read_text())
    if draw.random() < 0.08:
        return _damaged(draw, file)
    if draw.random() < 0.3:
        overrides = [_override(draw, values) for _ in range(draw.randint(1, 3))]
        return Case(f"{file.stem}: {overrides!r:.300}", file.read_text(), overrides)
    descriptions = [draw.choice(MUTATIONS)(draw, values) for _ in range(draw.randint(1, 3))]
    return Case(f"{file.stem}: {'; '.join(descriptions)}"[:400], yaml.safe_dump(values, sort_keys=False), [])


def _damaged(draw: random.Random, file: Path) -> Case:
    text = file.read_text()
    kind = draw.randrange(5)
    if kind == 0:
        number = draw.randrange(len(TEXTS))
        return Case(f"text {number}", TEXTS[number], [])
    if kind == 1:
        cut = draw.randrange(len(text))
        return Case(f"{file.stem} cut at {cut}", text[:cut], [])
    if kind == 2:
        at = draw.randrange(len(text))
        put = draw.choice("\t{}[]:,&*!|>'\"%@`#-?\x00\x07")
        return Case(f"{file.stem} with {put!r} at {at}", text[:at] + put + text[at:], [])
    lines = text.splitlines(keepends=True)
    number = draw.randrange(len(lines))
    if kind == 3:
        return Case(f"{file.stem} with line {number} twice", "".join([*lines[: number + 1], *lines[number:]]), [])
    lines[number] = draw.choice(["\t", "  ", "   "]) + lines[number]
    return Case(f"{file.stem} with line {number} indented", "".join(lines), [])


def _places(values: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields every key of nested mappings and lists."""
    if not isinstance(values, (dict, list)):
        return
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in list(items):
        yield (*at, key)
        yield from _places(value, (*at, key))


def _known(model: Any = Config, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields every key of the schema, lists of sections aside."""
    for name, field in model.model_fields.items():
        yield (*at, name)
        for inner in (field.annotation, *(get_args(field.annotation) if name in OBJECTIVES else ())):
            if isinstance(inner, type) and hasattr(inner, "model_fields"):
                yield from _known(inner, (*at, name))


KNOWN = list(dict.fromkeys(_known()))
ENGINE = [
    "count",
    "tensor",
    "expert",
    "pipeline",
    "dp_attention",
    "nodes",
    "max_total_tokens",
    "urls",
    "frozen",
    "role",
]
SGLANG = ["mem_fraction_static", "max_running_requests", "chunked_prefill_size", "kv_cache_dtype", "moe_a2a_backend"]
SGLANG += ["ep_num_redundant_experts", "disable_cuda_graph", "enforce_shared_experts_fusion", "moe_dense_tp_size"]


def _holder(values: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        values = values[key]
    return values


def _anything(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(draw.choice([NUMBERS, NUMBERS, NOT_NUMBERS, STRINGS, STRUCTURES])))


def _replace(draw: random.Random, values: Any) -> str:
    place = draw.choice(list(_places(values)) or [("run",)])
    _holder(values, place)[place[-1]] = new = _anything(draw)
    return f"{place} = {new!r:.80}"


def _scale(draw: random.Random, values: Any) -> str:
    """Puts another number in the place of a number: what fits the schema and not the model or the machine."""
    places = [p for p in _places(values) if type(_holder(values, p)[p[-1]]) in (int, float)]
    if not places:
        return "nothing"
    place = draw.choice(places)
    old = _holder(values, place)[place[-1]]
    new = draw.choice([old * 2, old * 16, old * 1000, old // 2, old / 3, -old, old + 1, 1, 3, 65536])
    _holder(values, place)[place[-1]] = new
    return f"{place} = {new}"


def _known_key(draw: random.Random, values: Any) -> str:
    place, at = draw.choice(KNOWN), values
    for key in place[:-1]:
        if not isinstance(at.get(key), dict):
            at[key] = {}
        at = at[key]
    at[place[-1]] = new = _anything(draw)
    return f"{place} = {new!r:.80}"


def _engine(draw: random.Random, values: Any) -> str:
    groups = values.get("rollout", {}).get("engines") if isinstance(values.get("rollout"), dict) else None
    if not isinstance(groups, list) or not groups or not isinstance(groups[0], dict):
        return "nothing"
    group, key = draw.choice([g for g in groups if isinstance(g, dict)]), draw.choice(ENGINE + SGLANG)
    inside = group.setdefault("sglang", {}) if key in SGLANG else group
    if not isinstance(inside, dict):
        return "nothing"
    inside[key] = new = draw.choice([0.1, 16, 1, 2, 4, 32, 1024, 0, "auto", _anything(draw)])
    return f"engine {key} = {new!r:.80}"


def _delete(draw: random.Random, values: Any) -> str:
    place = draw.choice(list(_places(values)) or [("none",)])
    holder = _holder(values, place)
    if place[-1] in holder or isinstance(holder, list):
        del holder[place[-1]]
    return f"without {place}"


def _rename(draw: random.Random, values: Any) -> str:
    places = [p for p in _places(values) if isinstance(p[-1], str)]
    if not places:
        return "nothing"
    place = draw.choice(places)
    holder, key = _holder(values, place), place[-1]
    letters = list(key)
    letters.insert(draw.randrange(len(key) + 1), draw.choice("xs_ .=\n"))
    name = draw.choice(["".join(letters), key[:-1], key.upper(), ""])
    holder[name] = holder.pop(key)
    return f"{place} called {name!r}"


def _swap(draw: random.Random, values: Any) -> str:
    if len(values) < 2:
        return "nothing"
    one, other = draw.sample(sorted(values, key=str), 2)
    values[one], values[other] = values[other], values[one]
    return f"{one} and {other} exchanged"


def _model(draw: random.Random, values: Any) -> str:
    models = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "configs/moe/models").iterdir())]
    values["model"] = {"path": draw.choice(MODELS + models), "family": draw.choice([None, None, "os", "no.such", 7])}
    return f"model {values['model']}"


def _too_small(draw: random.Random, values: Any) -> str:
    """Sets too few ranks, or too little memory, for a large model: nothing fits and layouts are searched."""
    trainer = values.get("trainer")
    values["cluster"] = {
        "gpu": draw.choice(["h100", "h200", "gb300"]),
        "gpu_memory_gib": draw.choice([None, 10, 40, 500]),
    }
    if isinstance(trainer, dict) and draw.random() < 0.5:
        values["trainer"] = {"world_size": draw.choice([1, 2, 8, 64, 256, 1024, 4096])}
    values["publish"] = draw.choice([{}, values.get("publish")])
    return f"cluster {values['cluster']}, trainer {values.get('trainer')}"


MUTATIONS = [
    _replace,
    _replace,
    _scale,
    _scale,
    _known_key,
    _known_key,
    _engine,
    _engine,
    _delete,
    _rename,
    _swap,
    _model,
    _too_small,
]


def _override(draw: random.Random, values: Any) -> str:
    place = draw.choice([*KNOWN, *(p for p in _places(values) if all(isinstance(k, str) for k in p))])
    value = _anything(draw)
    written = (
        value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).split("\n...")[0].strip()
    )
    key = ".".join(map(str, place))
    shape = draw.randrange(12)
    if shape == 0:
        return draw.choice(
            ["", "=", "=1", "x", key, f"{key}==1", f"{key}.0=1", f".{key}=1", f"{key}.=1", "a[b=1", f"{key}=["]
        )
    return f"{key}={written}"


def problem(
    mutated: Case, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """Returns the fault of the output for `mutated`; None if it has none."""
    file = folder / "run.yaml"
    file.write_text(mutated.text)
    monkeypatch.setattr(sys, "argv", ["slimx", "plan", str(file), *mutated.overrides])
    began, code = time.process_time(), 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:  # a traceback, whatever it is of
        return f"{mutated.what}: {type(error).__name__}: {str(error)[:200]}"
    seconds = time.process_time() - began
    _, output = capsys.readouterr()
    if code not in (0, 2):
        return f"{mutated.what}: exit code {code}"
    lines = output.splitlines()
    usage = bool(lines) and lines[0].startswith("Usage:")  # arguments that the command line itself refuses
    if not usage and (bool(lines) != (code == 2) or not all(line.startswith(("slimx: ", "  ")) for line in lines)):
        return f"{mutated.what}: exit code {code} with {output[:300]!r}"
    if any(ord(letter) < 32 and letter != "\n" for letter in output):
        return f"{mutated.what}: control characters in {output[:300]!r}"
    if too_long(seconds):
        return f"{mutated.what}: {seconds:.1f} s"
    return None


def answers(cases: Iterable[Case], folder: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)  # model.path of the shipped configurations is relative to it
    problems = [found for case in cases if (found := problem(case, folder, capsys, monkeypatch)) is not None]
    assert not problems, "\n".join(problems)


@pytest.mark.timeout(1800)  # for hangs: it takes 10 s
def test_wrong_configurations_are_answered(tmp_path, capsys, monkeypatch):
    answers((case(seed, small=True) for seed in range(20)), tmp_path, capsys, monkeypatch)


@pytest.mark.slow("500 configurations")
@pytest.mark.timeout(2 * 3600)
def test_hundreds_of_others_are_answered_too(tmp_path, capsys, monkeypatch):
    """Tries others in each run, by the seed of the order."""
    answers(map(case, random.sample(range(2**32), 500)), tmp_path, capsys, monkeypatch)


FROZEN_OUT = "rollout.engines=[{count: 8, nodes: 4, tensor: 32, expert: 32, dp_attention: 32, sglang: %s}]"
TOO_LARGE = {
    "an engine without room": ("kimi-k2", FROZEN_OUT % "{mem_fraction_static: 0.1, moe_dense_tp_size: 1}"),
    "an impossible share": ("kimi-k2", FROZEN_OUT % "{mem_fraction_static: 16}"),
    "no engines, moments on the GPU": (
        "glm-4.5",
        "rollout.engines=[]",
        "algorithm.name=sft",
        "schedule.colocate=false",
        "trainer.optimizer.offload_fraction=0",
    ),
    "bf16 engines": ("glm-4.5", "publish.quantize=null"),
    "a small GPU for a large model": ("deepseek-v3", "cluster.gpu_memory_gib=20"),
    "a small GPU": ("qwen3-30b-a3b", "cluster.gpu_memory_gib=20"),
    "too many ranks": ("qwen3-30b-a3b", "trainer.world_size=1000000000"),
    "too many tokens": ("qwen3-30b-a3b", f"trainer.max_tokens_per_microbatch={10**30}"),
}
SELDOM = {"an engine without room", "bf16 engines", "a small GPU for a large model"}
"""They take longest, and are refused where others are."""


@pytest.mark.timeout(900)  # for hangs: seconds are counted by the processor's clock
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow("full grid of configurations")] if n in SELDOM else [])
        for n in TOO_LARGE
    ],
)
def test_a_run_that_cannot_fit_is_answered_too(name: str, tmp_path, capsys, monkeypatch):
    stem, *overrides = TOO_LARGE[name]
    text = (ROOT / "configs" / "moe" / f"{stem}.yaml").read_text()
    answers([Case(name, text, overrides)], tmp_path, capsys, monkeypatch)
