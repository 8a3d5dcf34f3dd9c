"""The tables that benchmarks/rollout_scale.py prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rollout_scale_engine import TOP_K

from slimx.extras.rollout_workers.load import Traffic, load_of

GOAL = 0.25
"""Largest accepted deviation of the predicted load from the measured one."""
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
    return "\n".join([*lines, *deviations(rows)])


def deviations(rows: Sequence[Row]) -> list[str]:
    """Returns sentences about the predicted loads of slimx's workers and driver, relative to the measured ones."""
    out = []
    for name in ("workers", "driver"):
        ratios = []
        for row in rows:
            if row["side"] == "slimx" and row["rollouts"]:
                predicted, measured = loads(row, name)
                ratios.append(predicted / max(measured, 1e-3) - 1)
        if ratios:
            goal = "met" if max(map(abs, ratios)) <= GOAL else "missed"
            listed = ", ".join(f"{ratio:+.0%}" for ratio in ratios)
            out.append(f"predicted load of the {name}, relative to the measured one: {listed}; goal {GOAL:.0%}: {goal}")
    return out


def loads(row: Row, name: str) -> tuple[float, float]:
    """Returns the predicted and the measured load of `name`, "driver" or "workers", as shares of a core."""
    return getattr(load_of(traffic_in(row)), name), row["cpu"][name] / row["seconds"]


def describe_shapes(rows: Sequence[Row]) -> str:
    """Returns a row for each shape with the predicted and the measured load."""
    lines = [
        f"{'side':<7}{'turns':>6}{'answer':>8}{'layers':>8}{'requests/s':>12}{'ms a request: worker':>22}"
        f"{'driver ms/rollout':>19}{'Ray':>7}{'workers: predicted':>20}{'measured':>10}"
        f"{'driver: predicted':>19}{'measured':>10}"
    ]
    for row in rows:
        ms = row["ms_request"]
        line = (
            f"{row['side']:<7}{row['turns']:>6}{row['answer']:>8}{row['layers']:>8}{row['rate']:>12.0f}"
            f"{ms['workers']:>22.2f}{row['driver_ms_rollout']:>19.2f}{ms['ray']:>7.2f}"
        )
        if row["side"] == "slimx":
            for name, width in (("workers", 20), ("driver", 19)):
                predicted, measured = loads(row, name)
                line += f"{predicted:>{width}.1%}{measured:>10.1%}"
        lines.append(line)
    lines += deviations(rows)
    return "\n".join(lines)


def traffic_in(row: Row) -> Traffic:
    """Returns the traffic of a measurement."""
    requests = row["rate"]
    sampled = requests * row["answer"]
    sent = requests * row["sent"] / row["turns"]
    rollouts = row["rollouts"] / row["seconds"]
    kept = rollouts * row["length"]
    experts = row["layers"] * TOP_K
    return Traffic(
        rollouts=rollouts,
        requests=requests,
        sent=sent,
        sampled=sampled,
        kept=kept,
        routes=experts * (sent + sampled),
        kept_routes=experts * kept,
    )


def fits(parts: Mapping[str, Sequence[Row]]) -> list[str]:
    """Returns sentences about the costs of workers and driver that fit all measurements of slimx best, by the least
    squares of relative errors."""
    rows = [row for name in parts for row in parts[name] if row["side"] == "slimx" and row["rollouts"]]
    if not rows:
        return []
    seconds = np.array([row["seconds"] for row in rows])
    requests = np.array([row["requests"] for row in rows])
    sampled = requests * [row["answer"] / 1e3 for row in rows]
    sent = requests * [row["sent"] / row["turns"] / 1e3 for row in rows]
    rollouts = np.array([row["rollouts"] for row in rows])
    routes = (sent + sampled) * [row["layers"] * TOP_K / 1e3 for row in rows]
    tokens = rollouts * [row["length"] / 1e3 for row in rows]
    kept = tokens * [row["layers"] * TOP_K / 1e3 for row in rows]
    out = []
    for name, units in (
        (
            "workers",
            {
                "rollout": rollouts,
                "request": requests,
                "1,000 sent": sent,
                "1,000 sampled": sampled,
                "million experts": routes,
            },
        ),
        ("driver", {"second": seconds, "rollout": rollouts, "1,000 tokens": tokens, "million experts": kept}),
    ):
        spent = np.array([1e3 * row["cpu"][name] for row in rows])
        weights = 1 / np.maximum(spent, 1.0)  # the same relative error for each shape
        costs = _least_squares(np.stack([*units.values()], 1) * weights[:, None], spent * weights)
        listed = ", ".join(f"{cost:.3f} ms a {unit}" for unit, cost in zip(units, costs, strict=True))
        out.append(f"costs of the {name}: {listed}")
    return out


def _least_squares(per: np.ndarray, spent: np.ndarray) -> np.ndarray:
    """Returns the costs, none of them negative, that fit best: the negative ones of a fit are left out of the next."""
    kept = np.ones(per.shape[1], bool)
    while True:
        costs = np.zeros(per.shape[1])
        costs[kept] = np.linalg.lstsq(per[:, kept], spent, rcond=None)[0]
        if (costs >= 0).all():
            return costs
        kept &= costs >= 0


def describe_waiting(rows: Sequence[Row]) -> str:
    """Returns a row for each side."""
    lines = [f"{rows[0]['waiting']:,} rollouts in flight"]
    for row in rows:
        ms, cpu, seconds = row["ms_request"], row["cpu"], row["seconds"]
        lines.append(
            f"{row['side']:<7}{row['workers']:>3} workers, {row['rate']:.0f} requests/s: {ms['all']:.2f} ms a request "
            f"(workers {ms['workers']:.2f}, driver {ms['driver']:.2f}, Ray {ms['ray']:.2f}); driver "
            f"{cpu['driver'] / seconds:.1%} of a core and {row['driver_mb']:,.0f} MB, workers "
            f"{cpu['workers'] / seconds:.1%} and {sum(row['workers_mb']):,.0f} MB; all ended in {row['ended_s']:.1f} s"
        )
    return "\n".join(lines)
