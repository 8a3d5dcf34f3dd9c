"""Runs a function of a test module as one rank of the test:

    python -m tests.integration.rank_main MODULE:FUNCTION JOB.json RANK

RANK.json in the directory of the job is what the function returns. The job's `out` is that directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pkgutil import resolve_name


def main() -> None:
    function, file, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    job = json.loads(file.read_text()) | {"out": file.parent}
    result = resolve_name(function)(job, rank)
    (file.parent / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
