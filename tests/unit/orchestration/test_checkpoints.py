"""The driver's side of checkpoints: what is complete, what is kept, what is named when something is wrong."""

from __future__ import annotations

import asyncio
import pickle
import re

import pytest

from slimx.errors import DeadlineError
from slimx.extras.megatron_files.directory import find_checkpoint
from slimx.layout.ranks import Sizes
from slimx.orchestration.state import checkpoints as module
from slimx.orchestration.state.resume import check_resume, layout_of
from slimx.orchestration.state.saves import RunState, read_state
from slimx.trainer.checkpoint import files
from slimx.trainer.checkpoint.files import read_manifest
from tests.refusals import invalid, refused
from tests.unit.orchestration.checkpointing_stand import Bench, config, state, trained


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.005)


# Saving ---------------------------------------------------------------------------------------------------------------


async def test_a_checkpoint_gets_its_name_when_the_last_rank_has_written(tmp_path):
    bench = Bench(tmp_path)
    await bench.checkpoints.save(state(12))
    bench.trainers.write(0)
    await asyncio.sleep(0.05)
    bench.checkpoints.check()
    assert bench.names == ["iter_0000012.partial"] and bench.saves.newest() is None
    bench.trainers.write(1)
    await bench.checkpoints.settle()
    assert bench.names == ["iter_0000012"]
    path = bench.saves.newest()
    assert path is not None and read_state(path).step == 12
    assert sorted(read_manifest(path)) == ["__0_0.distcp", "__1_0.distcp", "slimx/run.json", "slimx/tickets.bin"]
    assert sorted(file.name for file in (path / "slimx").iterdir()) == ["manifest.json", "run.json", "tickets.bin"]
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert bench.notes == [f"checkpoint {path}"]


async def test_the_run_state_is_that_of_the_copy_not_of_the_commit(tmp_path):
    bench, rollouts = Bench(tmp_path), {"source": {"cursor": 5}, "next": 9, "tickets": []}
    await bench.checkpoints.save(RunState(step=2, version=2, policies={}, rollouts=rollouts))
    rollouts["source"]["cursor"] = 6
    for rank in range(2):
        bench.trainers.write(rank)
    await bench.checkpoints.settle()
    assert read_state(bench.saves.newest()).rollouts["source"] == {"cursor": 5}


async def test_a_second_save_waits_for_the_first(tmp_path):
    bench = Bench(tmp_path)
    await bench.checkpoints.save(state(1))
    second = asyncio.create_task(bench.checkpoints.save(state(2)))
    await asyncio.sleep(0.05)
    assert not second.done() and len(bench.trainers.saves) == 1
    for rank in range(2):
        bench.trainers.write(rank, bench.trainers.saves[0])
    await second
    assert len(bench.trainers.saves) == 2 and "iter_0000001" in bench.names
    await bench.checkpoints.stop(grace_s=0.05)


async def test_a_synchronous_save_returns_when_the_files_are_there(tmp_path):
    bench = Bench(tmp_path, asynchronous=False)
    saving = asyncio.create_task(bench.checkpoints.save(state(1)))
    while not bench.trainers.saves:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    assert not saving.done()
    for rank in range(2):
        bench.trainers.write(rank)
    await saving
    assert bench.names == ["iter_0000001"]


async def test_a_failed_write_stops_the_run_with_the_rank_and_the_reason(tmp_path):
    bench = Bench(tmp_path)
    await bench.checkpoints.save(state(1))
    bench.trainers.write(0)
    files.write_failure(bench.trainers.saves[0], 1, "OSError: [Errno 28] No space left on device")
    with refused("checkpoint.write", about=str(bench.trainers.saves[0])) as caught:
        while True:
            bench.checkpoints.check()
            await asyncio.sleep(0.005)
    assert "trainer rank 1" in str(caught.value) and "[Errno 28]" in str(caught.value)
    assert bench.saves.newest() is None


async def test_unreadable_reports_stop_the_run_with_the_same_error(tmp_path, monkeypatch):
    bench = Bench(tmp_path)
    await bench.checkpoints.save(state(1))

    def unreadable(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(files, "unreported", unreadable)
    with refused("checkpoint.write", about=str(bench.trainers.saves[0])):
        await bench.checkpoints.settle()


async def test_a_rank_that_never_writes_is_named_after_the_deadline(tmp_path):
    bench = Bench(tmp_path, deadline=0.1)
    await bench.checkpoints.save(state(1))
    bench.trainers.write(0)
    with pytest.raises(DeadlineError) as late:
        await bench.checkpoints.settle()
    assert late.value.holder == "trainer rank 1"


async def test_remains_of_an_interrupted_save_are_removed(tmp_path):
    bench = Bench(tmp_path)
    await bench.checkpoints.save(state(1))
    bench.trainers.write(0)
    await bench.checkpoints.stop(grace_s=0.05)
    assert bench.saves.newest() is None
    await bench.save(2)
    assert bench.names == ["iter_0000002"]


async def test_a_nearly_complete_save_finishes_when_the_run_is_stopped(tmp_path):
    bench = Bench(tmp_path)
    await bench.checkpoints.save(state(1))
    stopping = asyncio.create_task(bench.checkpoints.stop(grace_s=60))
    await asyncio.sleep(0.02)
    for rank in range(2):
        bench.trainers.write(rank)
    await stopping
    assert bench.names == ["iter_0000001"]


async def test_the_newest_and_every_nth_are_kept(tmp_path):
    bench = Bench(tmp_path, every=1, keep=2, keep_every=3)
    for step in range(1, 8):
        await bench.save(step)
    assert bench.names == ["iter_0000003", "iter_0000006", "iter_0000007"]


def test_retention_that_no_checkpoint_can_meet_is_refused(tmp_path):
    with invalid("checkpoint.keep_every", about="checkpoint.keep_every"):
        config(tmp_path, every=2, keep_every=5)


# Loading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verify", "damaged"), [("full", "__1_0.distcp"), ("size", None)])
async def test_edited_bytes_are_named_by_the_rank_that_reads_them(tmp_path, verify, damaged):
    bench = Bench(tmp_path, verify=verify)
    await bench.save(4)
    path = bench.saves.newest()
    (path / "__1_0.distcp").write_bytes(b"sharks of 1")
    check_resume(path, read_state(path), trained(bench.config))
    if damaged is None:
        await bench.checkpoints.restore(path, read_state(path))
        assert bench.trainers.restored == [(path, True, True)]
    else:
        with refused("checkpoint.damaged", about=str(path / damaged)):
            await bench.checkpoints.restore(path, read_state(path))
        assert not bench.trainers.restored


@pytest.mark.parametrize(
    ("damage", "damaged"),
    [
        (lambda path: (path / "__0_0.distcp").write_bytes(b"sha"), "__0_0.distcp"),
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp"),
        (lambda path: (path / "slimx" / "run.json").write_text("{}"), "slimx/run.json"),
    ],
)
async def test_a_file_of_another_size_is_named_before_anything_starts(tmp_path, damage, damaged):
    bench = Bench(tmp_path)
    await bench.save(4)
    path, kept = bench.saves.newest(), read_state(bench.saves.newest())
    damage(path)
    with refused("checkpoint.damaged", about=str(path / damaged)) as error:
        check_resume(path, kept, trained(bench.config))
    assert error.value.checkpoint == path
    copy = pickle.loads(pickle.dumps(error.value))  # as it comes from a rank
    assert (copy.code, copy.about, copy.checkpoint, str(copy)) == (
        "checkpoint.damaged",
        error.value.about,
        path,
        str(error.value),
    )


async def test_ranks_read_shares_of_about_equal_size_and_every_file_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PORTION", 20)
    bench = Bench(tmp_path)
    await bench.save(4)
    path = bench.saves.newest()
    await bench.checkpoints.restore(path, read_state(path))
    names = [name for shares in bench.trainers.checked for share in shares for name in share]
    assert sorted(names) == sorted(read_manifest(path)) and len(bench.trainers.checked) > 1
    assert any(note.startswith("verified ") for note in bench.notes)


@pytest.mark.parametrize(
    ("there", "trainer", "about"),
    [
        ({}, {"world_size": 2, "expert": 2}, "trainer.expert"),
        ({"distributed_optimizer": False}, {"world_size": 2}, "trainer.distributed_optimizer"),
    ],
)
async def test_an_optimizer_that_cannot_move_is_refused_with_both_layouts(tmp_path, there, trainer, about):
    bench = Bench(tmp_path)
    await bench.save(4)
    path, here = bench.saves.newest(), Sizes(data=2, expert=trainer.get("expert", 1))
    with refused("resume.layout", about=about) as error:
        check_resume(path, state(4, **there), trained(config(tmp_path, trainer=trainer), here))
    layouts = re.findall(r"TP1 PP1 VPP1 CP1 DP2 EP(\d) ETP1", str(error.value))
    assert layouts == ["1", str(here.expert)], "the checkpoint's and this run's"
    assert "checkpoint.load_optimizer=false" in str(error.value)
    allowed = config(tmp_path, trainer=trainer, load_optimizer=False)
    check_resume(path, state(4, **there), trained(allowed, here))


async def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path):
    bench = Bench(tmp_path)
    await bench.save(4)
    with refused("resume.optimizer", about="trainer.optimizer.kind"):
        check_resume(bench.saves.newest(), state(4, optimizer="muon"), trained(config(tmp_path)))
    check_resume(bench.saves.newest(), state(4, optimizer="muon"), trained(config(tmp_path, load_optimizer=False)))


async def test_weights_alone_are_loaded_with_a_warning(tmp_path):
    bench = Bench(tmp_path, load_optimizer=False)
    await bench.save(4)
    path = bench.saves.newest()
    await bench.checkpoints.restore(path, state(4, layout=layout_of(Sizes(tensor=2, context=2))))
    assert bench.trainers.restored == [(path, False, False)]
    assert "moments" in bench.notes[-1]


@pytest.mark.parametrize("change", [{"context": 2}, {"virtual": 2}, {"expert_tensor": 2}, {"split": (3, 1)}])
async def test_a_random_state_is_that_of_exactly_the_same_layout(tmp_path, change):
    bench = Bench(tmp_path)
    await bench.save(4)
    path = bench.saves.newest()
    await bench.checkpoints.restore(path, state(4, layout=layout_of(Sizes(data=2, **change))))
    assert bench.trainers.restored == [(path, False, True)]


async def test_a_checkpoint_is_found_as_one_of_megatron(tmp_path):
    bench = Bench(tmp_path)
    await bench.save(7)
    (bench.saves.directory / "other").mkdir()
    (bench.saves.newest() / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert find_checkpoint(bench.saves.directory) == bench.saves.newest()
