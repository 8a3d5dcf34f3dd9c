"""The link model: bytes counted like a plan's moves, seconds like the publisher's pipeline, shown only if accurate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slimx.extras.direct.dealing import deal
from slimx.extras.direct.wire import wire_bytes
from slimx.extras.low_precision.block_fp8 import quantization
from slimx.extras.planner.links.model import (
    STEPS,
    Links,
    LinkTrial,
    Traffic,
    direct_traffic,
    gb300_nvlink,
    h100_infiniband,
    predict,
    traffic_of,
)
from slimx.extras.planner.links.rehearsal import Rehearsal, rehearse
from slimx.layout.engine import EngineLayout
from slimx.layout.megatron import MegatronLayout
from slimx.layout.number_formats import Precision
from slimx.layout.ranks import EngineSizes, Sizes
from slimx.layout.table import checkpoint_parts
from slimx.models.families.qwen3_moe import engine_table, weight_table
from slimx.reshard.plan.copy_plan import compile_plan
from slimx.reshard.transports.memory import open_memory
from tests.refusals import refused
from tests.unit.layout.layout_stand import bytes_read

HF = {
    "hidden_size": 256,
    "head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
IDEAL = Links(
    name="ideal",
    pack=1.0,
    link=1.0,
    check=float("inf"),
    copy=float("inf"),
    verify=float("inf"),
    call=0.0,
    message=0.0,
    control=0.0,
)
"""A byte a second to pack and to send, nothing else takes time."""


def traffic(read: list[list[int]], received: list[list[int]], sent: list[list[int]] | None = None) -> Traffic:
    """Makes traffic of [buckets][ranks] bytes to one engine; by default all bytes read are sent."""
    read, received, sent = (np.array(rows) for rows in (read, received, sent or read))
    return Traffic(
        read=read,
        sent=sent,
        received=received,
        sends=(sent > 0).astype(int),
        receives=(received > 0).astype(int),
        tensors=3,
        engine_ranks=received.shape[1],
    )


# Seconds ------------------------------------------------------------------------------------------------------------


def test_a_bucket_is_packed_while_the_one_before_travels():
    # Pack 4, then max(pack 2, move 4), then max(pack 6, move 2), then move 6.
    assert predict(traffic([[4], [2], [6]], [[4], [2], [6]]), IDEAL).total == 4 + 4 + 6 + 6


def test_the_busiest_rank_of_each_bucket_counts_on_either_side():
    # Two senders fill one receiver, whose link is the busy one; in the second bucket one sender has all the work.
    stages = predict(traffic([[3, 3], [0, 8]], [[6], [8]]), IDEAL)
    assert stages.pack == 3 + 8 and stages.transfer == 6 + 8
    assert stages.total == 3 + max(8, 6) + 8


def test_stages_after_the_last_bucket_and_latencies_add_up():
    links = replace(IDEAL, copy=2.0, verify=4.0, check=10.0, call=0.5, message=0.25, control=0.125)
    stages = predict(traffic([[20]], [[20]]), links)
    assert stages.pack == 20 + 0.5
    assert stages.transfer == 20 + 0.25
    assert stages.check == 20 / 10 + 0.5
    assert stages.load == 20 / 2 + 3 * 0.5
    assert stages.verify == 20 / 4 + 0.5
    assert stages.control == (2 + STEPS) * 0.125
    assert stages.total == sum((stages.pack, stages.transfer, stages.check, stages.load, stages.verify, stages.control))


def test_a_bucket_travels_while_the_one_before_is_checked():
    links = replace(IDEAL, pack=float("inf"), check=2.0)
    assert predict(traffic([[4], [4], [4]], [[4], [4], [4]]), links).total == 4 + 4 + 4 + 2
    slow = replace(IDEAL, pack=float("inf"), check=0.5)  # the third is packed when the first is checked
    assert predict(traffic([[4], [4], [4]], [[4], [4], [4]]), slow).total == 4 + 8 + 8 + 8


def test_a_link_goes_on_with_the_next_bucket_while_another_is_busy():
    # The first sender has all of the first bucket, the second one all of the second.
    stages = predict(traffic([[6, 0], [0, 6]], [[1], [1]]), replace(IDEAL, pack=float("inf")))
    assert stages.total == 6 and stages.transfer == 6 + 6


def test_memory_that_both_sides_map_takes_no_transfer():
    stages = predict(traffic([[4]], [[4]]), replace(IDEAL, link=None))
    assert (stages.transfer, stages.total) == (0, 4)


def test_ranks_that_share_cores_do_not_gain_by_overlap():
    two = traffic([[4, 4], [4, 4]], [[8], [8]])
    links = replace(IDEAL, link=None, check=2.0)
    assert predict(two, replace(links, cores=3)).total == 4 + 4 + 4
    assert predict(two, replace(links, cores=1)).total == (8 + 8) + (4 + 4)


def test_a_bucket_that_is_loaded_at_once_delays_the_next_one():
    two = traffic([[4], [4]], [[8], [8]])
    links = replace(IDEAL, control=1.0)
    apart, at_once = predict(two, links), predict(two, links, by_bucket=True)
    assert at_once.control == apart.control + 2 * 1.0
    assert at_once.total > apart.total


def test_copies_and_readers_of_a_bucket_add_to_its_check():
    one = traffic([[4]], [[8]])
    links = replace(IDEAL, copy=2.0, within=4.0)
    alone = predict(one, links)
    assert predict(one, links, copies=2).check == alone.check + 2 * 8 / 2
    assert predict(replace(one, readers=8), links).check == alone.check + 8 * 8 / 4
    assert predict(replace(one, loaded=2), links).load == 2 / 2


def test_links_do_not_join_more_ranks_than_their_domain():
    many = traffic([[1] * 40], [[1] * 33])
    with refused("links.ranks", about=gb300_nvlink().name):
        predict(many, gb300_nvlink())
    assert predict(many, h100_infiniband()).total > 0


# Bytes --------------------------------------------------------------------------------------------------------------

SOURCES = Sizes(tensor=2, data=2, expert=2, expert_tensor=2)
ENGINE = EngineSizes(tensor=2, expert=2)


def test_the_direct_path_has_the_bytes_that_a_run_deals_out():
    plan = compile_plan(
        MegatronLayout(weight_table(HF), SOURCES).parts(),
        EngineLayout(engine_table(HF), ENGINE).parts(),
        precision=Precision("bfloat16", "bfloat16"),
        bucket_bytes=2**19,
        ranks=ENGINE.world,
    )
    found = direct_traffic(deal(plan, engines=3), sources=4)
    wire, sent = wire_bytes(deal(plan, engines=3)), found.sent.sum(axis=0)
    assert sent.tolist() == wire.sent(4).tolist()
    assert found.received.sum(axis=0).tolist() == wire.received(6).tolist() and found.engine_ranks == 6
    assert found.buckets > 1
    of_one = traffic_of(plan, sources=4, engines=3, engine_ranks=2, encoding="local")
    assert sent.tolist() != of_one.sent.sum(axis=0).tolist(), "engines take from other ranks than a single one would"


@pytest.mark.parametrize("quantization", [None, quantization("ieee")], ids=["bf16", "fp8"])
def test_bytes_on_links_are_those_of_the_buckets(quantization):
    plan = compile_plan(
        MegatronLayout(weight_table(HF), SOURCES).parts(),
        EngineLayout(engine_table(HF), ENGINE).parts(),
        precision=Precision("bfloat16", "bfloat16", quantization),
        bucket_bytes=1 << 20,
        ranks=2,
    )
    found = traffic_of(plan, sources=4, engines=3, engine_ranks=2, encoding="local")
    # The vocabulary of 512 needs no padding, so that every byte of every tensor is sent.
    expected = np.array(
        [[sum(t.nbytes for t in target[b].tensors) for target in plan.buckets] for b in range(plan.count)]
    )
    assert (found.received == expected).all()
    assert (found.sent.sum(axis=1) == 3 * expected.sum(axis=1)).all()
    assert found.read.sum() == bytes_read(plan).sum()
    assert found.engine_ranks == 6 and found.ranks == 10


def test_messages_are_pairs_of_ranks_that_share_a_bucket():
    plan = compile_plan(
        MegatronLayout(weight_table(HF), SOURCES).parts(),
        EngineLayout(engine_table(HF), ENGINE).parts(),
        precision=Precision("bfloat16", "bfloat16"),
        bucket_bytes=1 << 20,
        ranks=2,
    )
    found = traffic_of(plan, sources=4, engines=1, engine_ranks=2, encoding="local")
    pairs = {(m["bucket"].item(), m["source"].item(), m["target"].item()) for m in plan.moved}
    assert found.sends.sum() == found.receives.sum() == len(pairs)


def test_hugging_face_tensors_are_sent_once_per_engine():
    plan = compile_plan(
        MegatronLayout(weight_table(HF), SOURCES).parts(),
        checkpoint_parts(weight_table(HF)),
        precision=Precision("bfloat16", "bfloat16"),
        bucket_bytes=1 << 20,
    )
    found = traffic_of(plan, sources=4, engines=2, engine_ranks=4, encoding="hf")
    size = sum(bucket_tensor.nbytes for bucket in plan.buckets[0] for bucket_tensor in bucket.tensors)
    assert found.received.sum() == size and found.sent.sum() == 2 * size and found.engine_ranks == 8


# Trust --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "off", "holds"),
    [((1.0, 1.0, 9.0), 0.0, True), ((0.5, 0.5, 1.0), 1.0, False), ((1.5,) * 3, -1 / 3, False)],
)
def test_the_model_holds_if_the_median_pair_is_within_a_quarter(measured, off, holds):
    trial = LinkTrial((1.0,) * 3, measured)
    assert trial.off == pytest.approx(off) and trial.holds is holds


def test_a_rehearsal_publishes_for_real_and_predicts_in_the_same_unit():
    # A wrong unit is a factor of a thousand; a busy machine was off by 4.5.
    trial = rehearse()
    assert len(trial.measured) >= 3 and 1 / 30 < 1 + trial.off < 30


def test_the_staged_tensors_of_a_rehearsal_are_verified():
    rehearsal = Rehearsal.of(1)
    for bucket in range(rehearsal.plan.count):
        packed = rehearsal.pack(bucket)
        tensor = packed.tensors[-1]
        memory = open_memory(packed.path, packed.size)
        memory[tensor.offset] ^= 1
        with refused("links.checksum", about=tensor.name):
            rehearsal.stage(packed)
        memory[tensor.offset] ^= 1
        rehearsal.stage(packed)
    rehearsal.engine.load()
    assert rehearsal.engine.verify() == len(rehearsal.engine.parameters)
    rehearsal.engine.parameters["model.norm.weight"][0] += 1
    with refused("links.checksum", about="model.norm.weight"):
        rehearsal.engine.verify()
