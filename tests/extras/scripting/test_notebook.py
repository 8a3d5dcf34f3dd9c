"""A notebook trains with functions of its cells, and shows a refusal as one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

NOTEBOOK = Path(__file__).parents[3] / "examples" / "quickstart.ipynb"
REFUSED = {
    'slimx.load_config({"run.dir": "r", "model.pth": "m"})': "config.missing_key",
    'slimx.load_config("no.yaml")': "config.no_file",
    "config.schedule.steps = 3": "config.frozen",
    "slimx.train(config, reward=lambda ctx, trajectory: 1.0)": "script.hook",
    'slimx.train(config, {"reward.isolation": "process"}, reward=reward)': "script.reward_process",
    'slimx.metrics("nothing")': "run.none",
}
"""Cells that are refused, each with the code of its error."""
CELLS = (
    "import slimx",
    "def reward(ctx, trajectory):\n    return ctx.text == ctx.prompt.answer",
    'config = slimx.load_config({"run.dir": "r", "model.path": "m", "rollout.prompts": "p", "checkpoint.every": 5})',
)

pytestmark = pytest.mark.integration


def executed(notebook: Any, directory: Path, **options: Any) -> list[Any]:
    """Executes `notebook` in `directory`, and returns the outputs of each cell of code."""
    resources = {"metadata": {"path": str(directory)}}
    NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=resources, **options).execute()
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def test_a_refusal_in_a_notebook_is_one_line(tmp_path: Path) -> None:
    asked = [f"try:\n    {cell}\nexcept slimx.SlimxError as error:\n    print(error.code)" for cell in REFUSED]
    cells = [new_code_cell(text) for text in (*CELLS, *REFUSED, *asked)]
    outputs = executed(new_notebook(cells=cells), tmp_path, allow_errors=True)
    count = len(REFUSED)
    for output in outputs[len(CELLS) :][:count]:
        (error,) = output
        (text,) = error.traceback
        first, *others = text.splitlines()
        assert error.output_type == "error" and first.startswith("slimx: ")
        assert all(line.startswith("  ") for line in others), "one line per problem"
    assert [output[0].text.strip() for output in outputs[-count:]] == [*REFUSED.values()]


@pytest.mark.slow("a whole run")
@pytest.mark.timeout(1800)
def test_the_quickstart_notebook_learns_and_leaves_nothing(tmp_path: Path) -> None:
    outputs = executed(nbformat.read(NOTEBOOK, 4), tmp_path)
    shown = [output for cell in outputs for output in cell]
    assert [output for output in shown if output.output_type == "error"] == []
    metrics, rollouts = (output.data["text/html"] for output in shown if "text/html" in output.get("data", {}))
    assert metrics.count("<tr>") == 1 + 8 and "reward/mean" in metrics
    rewards = [float(row.split("<td>")[2].partition("<")[0]) for row in metrics.split("<tr>")[2:]]
    assert rewards[0] < 0.3 and rewards[-1] > 0.7
    assert rollouts.count("<tr>") == 1 + 6 and [*(tmp_path / "runs").iterdir()] == []


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    assert [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")] == []
