"""Groups survive a checkpoint bit for bit, and what cannot be understood is refused by name."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from slimx.data.records import SCHEMA_VERSION, Group, Prompt, Span, Trajectory
from slimx.data.saved.codec import decode, decode_groups, encode, encode_groups, load_groups, save_groups
from slimx.errors import SlimxError
from tests.refusals import refused


def random_trajectory(rng: np.random.Generator, index: int) -> Trajectory:
    prompt, response = int(rng.integers(1, 9)), int(rng.integers(1, 30))
    length = prompt + response
    logprobs = np.full(length, np.nan, dtype=np.float32)
    # Random bits: denormals, infinities and NaNs with payloads are all among them.
    logprobs[prompt:] = rng.integers(0, 2**32, response, dtype=np.uint32).view(np.float32)
    version = int(rng.integers(0, 1000))
    sampled = Span(start=prompt, stop=length, source="sampled", version=version)
    experts = rng.integers(0, 300, (length - 1, 2, 2)).astype(rng.choice([np.uint8, np.uint16]))
    return Trajectory(
        id=f"t{index}",
        rollout_id=f"r{index}",
        group_id="g",
        index=index,
        token_ids=rng.integers(0, 2**31 - 1, length, dtype=np.int32),
        loss_mask=rng.integers(0, 2, length, dtype=np.uint8),
        logprobs=logprobs,
        spans=[Span(start=0, stop=prompt, source="prompt"), sampled],
        sampling={"temperature": float(rng.random()), "top_k": -1, "seed": int(rng.integers(0, 2**63))},
        routed_experts=experts if rng.random() < 0.5 else None,
        reward=float(rng.standard_normal()) if rng.random() < 0.5 else None,
        reward_parts={"exact": float(rng.random())},
        status="truncated" if rng.random() < 0.5 else "completed",
        finish_reason="length",
        timings={"generate": float(rng.random())},
        metadata={"nested": [1, "é\u2028\n", None, {"a": True}], "array": rng.standard_normal((2, 3)), "raw": b"\xff"},
    )


def random_group(seed: int) -> Group:
    rng = np.random.default_rng(seed)
    prompt = Prompt(id=f"p{seed}", messages=[{"role": "user", "content": "1+1="}], answer="2")
    if seed % 2:
        prompt = Prompt(id=f"p{seed}", token_ids=rng.integers(0, 99, 5).tolist(), metadata={"level": seed})
    trajectories = [random_trajectory(rng, index) for index in range(int(rng.integers(0, 4)))]
    return Group(id=f"g{seed}", prompt=prompt, trajectories=trajectories)


def group_of_one() -> Group:
    trajectory = random_trajectory(np.random.default_rng(3), 0)
    return Group(id="g", prompt=Prompt(id="p", token_ids=[1]), trajectories=[trajectory])


def assert_identical(left: Any, right: Any, where: str = "record") -> None:
    """Equal in type and value; arrays in dtype, shape and every bit."""
    assert type(left) is type(right), where
    if isinstance(left, np.ndarray):
        assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes()), where
    elif hasattr(left, "__slots__"):
        for name in left.__slots__:
            assert_identical(getattr(left, name), getattr(right, name), f"{where}.{name}")
    elif isinstance(left, (list, dict)):
        assert len(left) == len(right), where
        for key in left if isinstance(left, dict) else range(len(left)):
            assert_identical(left[key], right[key], f"{where}[{key!r}]")
    else:
        assert left == right, where


def plain(group: Group) -> dict[str, Any]:
    """The record as the dicts and lists that a file holds, for a test to tamper with."""
    return msgspec.msgpack.decode(encode(group))


def test_groups_come_back_bit_for_bit():
    groups = [random_group(seed) for seed in range(60)]
    assert_identical(decode_groups(encode_groups(groups)), groups)
    assert decode_groups(encode_groups([])) == []


def test_nan_payloads_of_logprobs_survive():
    bits = np.array([0x7FC00001, 0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0x80000000], dtype=np.uint32)
    group = group_of_one()
    trajectory = group.trajectories[0]
    trajectory.logprobs[:5] = bits.view(np.float32)
    (read,) = decode_groups(encode_groups([group]))
    assert read.trajectories[0].logprobs.view(np.uint32)[:5].tolist() == bits.tolist()


def test_arrays_keep_dtype_shape_and_order_wherever_they_are():
    square = np.arange(12, dtype=np.int64).reshape(3, 4)
    arrays = [square.T, square[:, ::2], np.array(3.5, dtype=np.float16), np.zeros((0, 2), dtype=">i4"), square > 3]
    assert_identical(decode(list[Any], encode(arrays)), [np.array(array, order="C") for array in arrays])


def test_arrays_that_were_read_can_be_written_to():
    (read,) = decode_groups(encode_groups([group_of_one()]))
    read.trajectories[0].loss_mask[:] = 0


def test_numpy_scalars_of_hooks_come_back_as_equal_numbers():
    group = group_of_one()
    group.trajectories[0].reward = np.float32(0.1)
    group.trajectories[0].metadata = {"tries": np.int64(3), "ok": np.bool_(True)}
    (read,) = decode_groups(encode_groups([group]))
    assert read.trajectories[0].reward == float(np.float32(0.1))
    assert_identical(read.trajectories[0].metadata, {"tries": 3, "ok": True})


@pytest.mark.parametrize("value", [object(), np.array([object()]), np.zeros(2, dtype="i4,f4"), 2**70, lambda: None])
def test_a_value_that_cannot_be_written_is_refused_with_its_group(value):
    group = random_group(2)
    group.prompt.metadata["thing"] = value
    with refused("data.value", about="g2"):
        encode_groups([random_group(0), group])


def test_a_record_that_could_not_be_read_back_is_refused_when_written():
    group = random_group(2)
    group.prompt.answer = 46  # a user's source may build prompts without read_prompts
    with refused("data.field", about="g2"):
        encode_groups([group])


@pytest.mark.parametrize("place", ["group", "prompt", "trajectory"])
@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0, "1", None])
def test_a_schema_version_of_no_known_release_is_refused(place, version):
    group = group_of_one()
    tree = plain(group)
    record = {"group": tree, "prompt": tree["prompt"], "trajectory": tree["trajectories"][0]}[place]
    record["schema_version"] = version
    record["invented_later"] = 1  # a newer record has new fields: the message must still be about the version
    with refused("data.schema_version"):
        decode_groups(msgspec.msgpack.encode([tree]))
    del record["schema_version"], record["invented_later"]
    with refused("data.schema_version"):
        decode_groups(msgspec.msgpack.encode([tree]))


@pytest.mark.parametrize("place", ["group", "prompt", "trajectory", "span"])
def test_unknown_missing_and_mistyped_fields_are_refused(place):
    group = group_of_one()

    def tampered(change) -> bytes:
        tree = plain(group)
        trajectory = tree["trajectories"][0]
        span = trajectory["spans"][1]
        change({"group": tree, "prompt": tree["prompt"], "trajectory": trajectory, "span": span}[place])
        return msgspec.msgpack.encode([tree])

    needed = "start" if place == "span" else "id"
    assert len(decode_groups(tampered(lambda record: None))) == 1
    with refused("data.field", about="surplus"):
        decode_groups(tampered(lambda record: record.update(surplus=1)))
    with refused("data.field"):
        decode_groups(tampered(lambda record: record.pop(needed)))
    with refused("data.field"):
        decode_groups(tampered(lambda record: record.update({needed: [1.5]})))


def test_a_record_that_contradicts_itself_is_refused():
    group = group_of_one()
    tree = plain(group)
    tree["trajectories"][0]["spans"].pop()
    with refused("data.field"):
        decode_groups(msgspec.msgpack.encode([tree]))


def test_damaged_bytes_never_raise_anything_but_a_refusal():
    data = encode_groups([random_group(seed) for seed in range(4)])
    rng = np.random.default_rng(0)
    for _ in range(800):
        damaged = bytearray(data)
        damaged[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        with contextlib.suppress(SlimxError):
            decode_groups(bytes(damaged if rng.random() < 0.8 else damaged[: int(rng.integers(len(data)))]))


def test_a_saved_file_is_restored_and_leaves_no_temporary_file(tmp_path: Path):
    groups = [random_group(seed) for seed in range(5)]
    save_groups(tmp_path / "groups.bin", groups)
    save_groups(tmp_path / "groups.bin", groups)
    assert_identical(load_groups(tmp_path / "groups.bin"), groups)
    assert [entry.name for entry in tmp_path.iterdir()] == ["groups.bin"]


def test_a_file_truncated_or_edited_anywhere_is_named(tmp_path: Path):
    path = tmp_path / "groups.bin"
    save_groups(path, [random_group(seed) for seed in range(3)])
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for stop in [0, 1, len(data) - 1, *rng.integers(0, len(data), 50).tolist()]:
        path.write_bytes(data[:stop])
        complete_header = stop > data.index(b"\n")
        with refused("data.truncated" if complete_header else "data.header", about=str(path)):
            load_groups(path)
    for where in rng.integers(data.index(b"\n"), len(data), 100).tolist():
        path.write_bytes(data[:where] + bytes([data[where] ^ (1 << int(rng.integers(8)))]) + data[where + 1 :])
        with pytest.raises(SlimxError) as edited:
            load_groups(path)
        assert edited.value.about == str(path) and edited.value.code in ("data.checksum", "data.header")
    path.write_bytes(data + b"\0")
    with refused("data.truncated", about=str(path)):
        load_groups(path)
    path.write_bytes(data.replace(b"slimx-groups-1", b"slimx-groups-2"))
    with refused("data.format", about=str(path)):
        load_groups(path)
    with refused("data.unreadable", about=str(tmp_path / "absent.bin")):
        load_groups(tmp_path / "absent.bin")
