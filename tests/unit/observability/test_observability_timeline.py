"""Phases are timed right when they nest, overlap and fail, on several tracks and threads."""

import asyncio
import random
import threading
import time

import msgspec
import pytest

from slimx.observability.tracking.phases import Phase, Timeline, place


def phases(run_dir) -> list[Phase]:
    return [msgspec.json.decode(line, type=Phase) for line in (run_dir / "timeline.jsonl").read_text().splitlines()]


def phase(name, start, seconds, track="main", step=0) -> Phase:
    return Phase(name=name, step=step, track=track, start=1.7e9 + start, seconds=seconds)


def test_seconds_of_a_step_add_up_repeated_phases_and_keep_steps_apart(tmp_path):
    timeline = Timeline(tmp_path)
    for step, seconds in ((1, 2.0), (1, 3.0), (2, 5.0)):
        timeline.add(phase("train", 0, seconds, step=step))
    timeline.add(phase("start-up", 0, 9.0, step=None))
    assert timeline.take(1) == {"train": 5.0}
    assert timeline.take(2) == {"train": 5.0}
    assert timeline.take(3) == {}
    assert timeline.take(1) == {}, "a step that was taken does not stay in memory"
    timeline.close()


def test_a_phase_is_timed_and_dated(tmp_path):
    timeline = Timeline(tmp_path)
    before = time.time()
    with timeline.phase("train", step=1):
        time.sleep(0.02)
    (written,) = phases(tmp_path)
    assert 0.02 <= written.seconds < 10
    assert before - 0.01 <= written.start <= time.time()
    assert (written.name, written.step, written.track) == ("train", 1, "main")
    timeline.close()


def test_a_phase_that_fails_is_still_written(tmp_path):
    timeline = Timeline(tmp_path)
    with pytest.raises(ZeroDivisionError), timeline.phase("train", step=1):
        _ = 1 / 0
    assert [item.name for item in phases(tmp_path)] == ["train"]
    timeline.close()


def test_threads_and_tasks_on_separate_tracks_overlap_without_loss(tmp_path):
    timeline = Timeline(tmp_path)
    barrier = threading.Barrier(4)

    def work(track):
        barrier.wait()
        for step in range(25):
            with timeline.phase("outer", step=step, track=track), timeline.phase("inner", step=step, track=track):
                pass

    threads = [threading.Thread(target=work, args=(f"engine-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def generate():
        with timeline.phase("generate", step=99, track="rollout"):
            await asyncio.sleep(0.03)

    async def both():
        await asyncio.gather(generate(), generate())

    start = time.perf_counter()
    asyncio.run(both())
    took = time.perf_counter() - start
    timeline.close()
    assert len(phases(tmp_path)) == 4 * 25 * 2 + 2
    assert all(set(timeline.take(step)) == {"outer", "inner"} for step in range(25))
    assert 0.06 <= timeline.take(99)["generate"] <= 2 * took  # two at once: each counts whole
    rollout = [placed for placed in place(phases(tmp_path)) if placed.phase.track == "rollout"]
    assert {(placed.lane, placed.depth) for placed in rollout} in ({(0, 0), (1, 0)}, {(0, 0), (0, 1)})


def test_nested_phases_are_distinguished_from_overlapping_ones():
    placed = place(
        [
            phase("step", 0, 10),
            phase("train", 1, 6),
            phase("optimizer", 5, 2),
            phase("publish", 7, 3),
            phase("next", 8, 5),
            phase("generate", 0, 12, track="rollout"),
        ]
    )
    where = {item.phase.name: (item.lane, item.depth, round(item.self_seconds, 3)) for item in placed}
    assert where == {
        "step": (0, 0, 1.0),
        "train": (0, 1, 4.0),
        "optimizer": (0, 2, 2.0),
        "publish": (0, 1, 3.0),
        "next": (1, 0, 5.0),
        "generate": (0, 0, 12.0),
    }


def test_rounding_of_unix_seconds_does_not_break_nesting():
    placed = place([phase("step", 0, 1.0), phase("a", 0.5, 0.2 + 3e-7), phase("b", 0.7, 0.3 + 3e-7)])
    assert [(item.lane, item.depth) for item in placed] == [(0, 0), (0, 1), (0, 1)]


def test_time_without_children_adds_up_to_the_time_covered():
    rng = random.Random(0)

    def grow(start, seconds, depth):
        yield phase(f"d{depth}", start, seconds)
        if depth < 4:
            cut = sorted(rng.uniform(0, seconds) for _ in range(4))
            yield from grow(start + cut[0], cut[1] - cut[0], depth + 1)
            yield from grow(start + cut[1], cut[3] - cut[1], depth + 1)

    items = list(grow(0, 100, 0))
    rng.shuffle(items)
    placed = place(items)
    assert sum(item.self_seconds for item in placed) == pytest.approx(100, abs=1e-3)
    assert all(item.lane == 0 and item.phase.name == f"d{item.depth}" for item in placed)


def test_a_resumed_run_times_no_step_twice_and_keeps_its_start_up(tmp_path):
    first = Timeline(tmp_path)
    first.add(phase("start-up", 0, 1.0, step=None))
    for step in range(4):
        first.add(phase("train", step, 1.0, step=step))
    first.close()
    second = Timeline(tmp_path, resume_step=2)
    second.add(phase("train", 10, 1.0, step=2))
    second.close()
    assert [item.step for item in phases(tmp_path)] == [None, 0, 1, 2]
    assert phases(tmp_path)[-1].start == 1.7e9 + 10
