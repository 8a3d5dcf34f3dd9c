"""The tables that benchmarks/rollout_scale.py prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]


def describe(part: str, rows: Sequence[Row], idle: float) -> str:
    """Returns the table of a part. `idle`: share of a core that Ray uses without work."""
    if part == "shapes":
        return describe_shapes(rows)
    if part == "waiting":
        return describe_waiting(rows)
    return describe_scale(part, rows, idle)


def describe_scale(part: str, rows: Sequence[Row], idle: float) -> str:
    """Returns a row for each side and number of workers."""
    lines = [
        f"{part}: CPU of rollouts with {rows[0]['turns']} turns of {rows[0]['answer']} tokens",
        f"{'side':<7}{'workers':>8}{'ms a request:':>15}{'worker':>8}{'driver':>8}{'Ray':>7}{'us/token':>10}"
        f"{'driver ms/rollout':>19}{'efficiency':>12}{'MB/step to driver':>19}{'objects':>9}{'MB':>7}",
    ]
    first: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: (row["side"] != "slimx", row["workers"])):
        ms = row["ms_request"]
        efficiency = first.setdefault(row["side"], ms["all"]) / ms["all"]
        lines.append(
            f"{row['side']:<7}{row['workers']:>8}{ms['all']:>15.2f}{ms['workers']:>8.2f}{ms['driver']:>8.2f}"
            f"{ms['ray']:>7.2f}{row['us_token']:>10.1f}{row['driver_ms_rollout']:>19.2f}{efficiency:>12.2f}"
            f"{row['received_step'] / 1e6:>19.1f}{row['objects_step']:>9.0f}{row['object_bytes_step'] / 1e6:>7.1f}"
        )
    lines.append(f"Ray's processes use {idle:.1%} of a core without work")
    return "\n".join(lines)


def describe_shapes(rows: Sequence[Row]) -> str:
    """Returns a row for each shape, and the costs of a rollout, a request and a token that fit them."""
    lines = [f"{'side':<7}{'turns':>6}{'answer':>8}{'worker ms/request':>19}{'driver ms/rollout':>19}{'Ray':>7}"]
    for row in rows:
        ms = row["ms_request"]
        lines.append(
            f"{row['side']:<7}{row['turns']:>6}{row['answer']:>8}{ms['workers']:>19.2f}"
            f"{row['driver_ms_rollout']:>19.2f}{ms['ray']:>7.2f}"
        )
    for side in dict.fromkeys(row["side"] for row in rows):
        lines += [f"{side}: {text}" for text in fits([row for row in rows if row["side"] == side])]
    return "\n".join(lines)


def fits(rows: Sequence[Row]) -> list[str]:
    """Returns sentences about the costs that fit the CPU time of workers and driver with the least squares."""
    sampled = np.array([row["requests"] * row["answer"] for row in rows])
    sent = np.array([row["rollouts"] * row["sent"] for row in rows])
    requests = np.array([row["requests"] for row in rows])
    rollouts = np.array([row["rollouts"] for row in rows])
    out = []
    for name, units in (
        ("workers", {"rollout": rollouts, "request": requests, "1,000 tokens": (sampled + sent) / 1e3}),
        ("driver", {"rollout": rollouts, "request": requests}),
    ):
        spent = np.array([1e3 * row["cpu"][name] for row in rows])
        per = np.stack([*units.values()], 1) / requests[:, None]
        costs, *_ = np.linalg.lstsq(per, spent / requests, rcond=None)
        listed = ", ".join(f"{cost:.3f} ms a {unit}" for unit, cost in zip(units, costs, strict=True))
        out.append(f"{name} {listed}")
    return out


def describe_waiting(rows: Sequence[Row]) -> str:
    """Returns a row for each side."""
    lines = [f"{rows[0]['waiting']:,} rollouts in flight"]
    for row in rows:
        ms = row["ms_request"]
        lines.append(
            f"{row['side']:<7}{row['workers']:>3} workers: {ms['all']:.2f} ms a request (workers {ms['workers']:.2f}, "
            f"driver {ms['driver']:.2f}, Ray {ms['ray']:.2f}); {row['rate']:.0f} requests/s; driver "
            f"{row['driver_mb']:,.0f} MB, workers {sum(row['workers_mb']):,.0f} MB"
        )
    return "\n".join(lines)
