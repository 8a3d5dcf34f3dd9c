"""Writes the table of docs/planning.md: the peak of each phase of every large configuration, by `slimx plan`.

    python -m tools.docs.make_phases

`tests/unit/config/test_moe_configs.py` compares each configuration's rows with the page.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from slimx.config.load import load_config
from slimx.extras.planner.plan.report import plan_report
from slimx.extras.planner.record import PlanReport

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "planning.md"
FILES = sorted(file for file in (ROOT / "configs/moe").glob("*.yaml") if not file.stem.startswith("quickstart"))
PHASES = ("load", "start", "restore", "publish", "generate", "sleep", "train", "save", "wake")
GIB = 2**30
HEAD = ("file", "GPU", "GiB", *PHASES, "host, GiB", "disk, TB")


def rows(stem: str, report: PlanReport) -> list[str]:
    """Returns the rows of one configuration, one per kind of GPU."""
    peaks: dict[str, dict[str, int]] = {}
    for phase in report.phases:
        kind = peaks.setdefault(phase.group if phase.gpu == "engine" else phase.gpu, {})
        kind[phase.phase] = max(kind.get(phase.phase, 0), phase.nbytes)
    out = []
    for number, (kind, by_phase) in enumerate(peaks.items()):
        cells = [f"{by_phase[phase] / GIB:.0f}" if phase in by_phase else "" for phase in PHASES]
        first = [stem, kind, f"{report.gpu_memory / GIB:.0f}"] if number == 0 else ["", kind, ""]
        host = f"{report.host.nbytes / GIB:.0f} of {report.host.memory / GIB:.0f}"
        last = [host, f"{report.disk.nbytes / 1e12:.1f}"] if number == 0 else ["", ""]
        out.append(f"| {' | '.join([*first, *cells, *last])} |")
    return out


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    os.chdir(ROOT)  # model.path names a directory of this repository
    table = [f"| {' | '.join(HEAD)} |", "| --- " * len(HEAD) + "|"]
    for file in FILES:
        table += rows(file.stem, plan_report(load_config(file, [])).report)
    text, found = re.subn(
        r"\| file \| GPU \|.*?(?=\n\n)", lambda _: "\n".join(table), PAGE.read_text(), flags=re.DOTALL
    )
    assert found == 1, PAGE
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
