"""One rank's receiver without a server: what it takes, what it refuses, and what it vouches for."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slimx.adapters.sglang.weights.receiver import RankReceiver, receiver_of
from slimx.layout.ranks import EngineSizes
from slimx.reshard.kernels.cpu import checksum_tensor
from slimx.reshard.transports.memory import MemoryFile
from tests.gpu.receiving import SIZE, proves_and_holds
from tests.refusals import refused
from tests.unit.adapters.engine_model import (
    DEEPSEEK,
    QWEN3,
    ServerModel,
    Weights,
    checkpoint,
    engine_layout,
    expert_location,
    rank_local,
)
from tests.unit.adapters.receiver_stand import LATENT, LAYOUT, SIZES, assert_holds, held, manifest, outcome, stage


@pytest.fixture
def model() -> ServerModel:
    """The second rank of two: it holds half of the experts, and half of everything that is split."""
    return ServerModel(DEEPSEEK, SIZES, rank=1)


@pytest.fixture
def receiver(model: ServerModel) -> RankReceiver:
    return receiver_of(model)


class Sent:
    """A bucket in a memory file, as it is announced to one rank."""

    def __init__(self, weights: Weights) -> None:
        self.fd, self.entries, end = os.memfd_create("slimx-bucket"), [], 0
        for name, tensor in weights.items():
            os.pwrite(self.fd, tensor.contiguous().numpy().tobytes(), end)
            entry = {"name": name, "dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "offset": end}
            self.entries.append(entry | {"nbytes": tensor.nbytes, "checksum": f"{checksum_tensor(tensor):016x}"})
            end += tensor.nbytes
        self.size = end

    def argument(self, version: int = 1, epoch: int = 0, bucket: int = 0) -> dict[str, Any]:
        where = {"fd_path": f"/proc/self/fd/{self.fd}", "size": self.size, "tensors": self.entries}
        return {"policy": "actor", "version": version, "epoch": epoch, "bucket": bucket} | where


@pytest.fixture
def sent() -> Iterator[Any]:
    """Makes buckets, and closes them at the end."""
    made: list[Sent] = []

    def make(weights: Weights) -> Sent:
        made.append(Sent(weights))
        return made[-1]

    yield make
    for one in made:
        os.close(one.fd)


@pytest.mark.parametrize("encoding", ["hf", "local"])
@pytest.mark.parametrize("buckets", [1, 2, 5])
@pytest.mark.parametrize("staging", ["model", "bucket"])
def test_a_publication_arrives_whole(model, receiver, sent, encoding: str, buckets: int, staging: str) -> None:
    for version in (1, 2):
        weights = checkpoint(LAYOUT, seed=version)
        offered = rank_local(LAYOUT, weights, 1) if encoding == "local" else weights
        before, derivations = held(model), model.derivations
        receiver.begin(manifest=manifest(version, encoding=encoding), staging=staging)
        for number in range(buckets):
            names = list(offered)[number::buckets]
            stage(receiver, **sent({name: offered[name] for name in names}).argument(version, bucket=number))
            if staging == "bucket":
                assert "error" not in outcome(model)
        assert receiver.status()["missing"] == 0
        if staging == "model":
            assert all(torch.equal(before[name], value) for name, value in held(model).items())
            assert "error" not in outcome(model)
        assert_holds(model, weights)
        assert encoding == "hf" or model.derivations == derivations + 1
        derived = [f"model.layers.{k}.self_attn.w_kc" for k in range(2)]
        answer = {"encoding": encoding, "tensors": len(offered), "differ": [], "missing": [], "derived": derived}
        assert receiver.verify() == answer
        assert receiver.commit(version=version)["version"] == version
        assert receiver.status()["open"] is None


def test_norms_that_keep_one_more_than_their_weight_keep_it_of_the_new_one(model, receiver, sent) -> None:
    """As SGLang's GemmaRMSNorm does, whose kernels read either; only its weight loader brings them together."""
    norm = model.get_submodule("model.norm")
    norm.register_buffer("gemma_weight", torch.zeros_like(norm.weight))
    norm.refresh_gemma_weight = lambda: norm.gemma_weight.copy_(norm.weight.data).add_(1.0)
    weights = checkpoint(LAYOUT)
    receiver.begin(manifest=manifest(encoding="local"), staging="model")
    stage(receiver, **sent(rank_local(LAYOUT, weights, 1)).argument())
    assert "error" not in outcome(model)
    assert norm.gemma_weight.equal(weights["model.norm.weight"] + 1)


@pytest.mark.parametrize("encoding", ["hf", "local"])
def test_scales_of_the_kv_cache_get_back_what_sleep_made_undefined(model, receiver, sent, encoding: str) -> None:
    """The first attention was processed by SGLang before it slept, with a scale from its checkpoint; the other not."""
    weights = checkpoint(LAYOUT)
    offered = rank_local(LAYOUT, weights, 1) if encoding == "local" else weights
    layers = [model.get_submodule(f"model.layers.{k}.self_attn") for k in range(2)]
    for layer in layers:
        layer.k_scale, layer.v_scale = (torch.nn.Parameter(torch.tensor(math.nan)) for _ in range(2))
    layers[0].k_scale_float, layers[0].v_scale_float = 0.25, 1.0
    receiver.begin(manifest=manifest(encoding=encoding), staging="model")
    stage(receiver, **sent(offered).argument())
    assert "error" not in outcome(model)
    assert [(layer.k_scale.item(), layer.v_scale.item()) for layer in layers] == [(0.25, 1.0), (-1.0, -1.0)]
    assert receiver.verify()["missing"] == []


def test_a_tensor_that_awaits_its_counterpart_outlives_its_bucket(model, receiver, sent) -> None:
    """SGLang drops a latent projection that comes without the other: the first waits, in memory of its own."""
    weights = checkpoint(LAYOUT)
    first = sent({LATENT[0]: weights[LATENT[0]]})
    receiver.begin(manifest=manifest(), staging="bucket")
    stage(receiver, **first.argument())
    assert outcome(model) == {"loaded": 0} and receiver.status()["staged"] == 1
    os.pwrite(first.fd, bytes(first.size), 0)  # the publisher packs the next bucket there
    stage(receiver, **sent({LATENT[1]: weights[LATENT[1]]}).argument())
    assert outcome(model) == {"loaded": 2}
    name = "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa.weight"
    assert torch.equal(model.get_parameter(name).data, torch.cat([weights[part] for part in LATENT]))
    assert receiver.verify()["differ"] == []


def test_bytes_that_changed_are_refused_before_any_copy(model, receiver, sent) -> None:
    weights = checkpoint(LAYOUT)
    before = held(model)
    for name in ("model.layers.1.mlp.experts.5.up_proj.weight", "model.layers.0.self_attn.q_b_proj.weight"):
        # The last byte belongs to this rank, the first of the second tensor to the other: both are looked at.
        for at in (0, weights[name].nbytes - 1):
            bucket = sent({name: weights[name]})
            os.pwrite(bucket.fd, bytes([os.pread(bucket.fd, 1, at)[0] ^ 1]), at)
            receiver.begin(manifest=manifest())
            with refused("receiver.checksum", about=name):
                stage(receiver, **bucket.argument())
            assert receiver.status()["open"] is None
    assert all(torch.equal(before[name], value) for name, value in held(model).items())


def test_bytes_that_change_after_staging_are_found_by_verification(model, receiver, sent) -> None:
    bucket = sent(checkpoint(LAYOUT))
    receiver.begin(manifest=manifest())
    stage(receiver, **bucket.argument())
    entry = next(e for e in bucket.entries if e["name"].endswith("0.self_attn.o_proj.weight"))
    os.pwrite(bucket.fd, b"\0\0\0\1", entry["offset"] + entry["nbytes"] - 4)
    assert "error" not in outcome(model)
    assert receiver.verify()["differ"] == [entry["name"]]
    with refused("receiver.not_verified", about="version 1 of actor (epoch 0)"):
        receiver.commit(version=1)


REFUSED = [
    ({"name": "model.norm.weights"}, "receiver.tensor"),
    ({"dtype": "bfloat16"}, "receiver.form"),
    ({"shape": [4, 4]}, "receiver.form"),
    ({"offset": 1 << 20}, "receiver.extent"),
    ({"offset": -4}, "receiver.extent"),
    ({"nbytes": 60}, "receiver.extent"),
]


@pytest.mark.parametrize(("change", "code"), REFUSED, ids=[str(change) for change, _ in REFUSED])
def test_entries_that_the_model_cannot_take_are_refused(receiver, sent, change: dict, code: str) -> None:
    bucket = sent({"model.norm.weight": torch.randn(16)})
    bucket.entries[0] |= change
    receiver.begin(manifest=manifest())
    with refused(code, about=bucket.entries[0]["name"]):
        stage(receiver, **bucket.argument())


def test_a_bucket_brings_a_tensor_once(receiver, sent) -> None:
    bucket = sent({"model.norm.weight": torch.randn(16)})
    bucket.entries *= 2
    receiver.begin(manifest=manifest())
    with refused("receiver.twice", about="model.norm.weight"):
        stage(receiver, **bucket.argument())


def test_a_tensor_comes_once_and_its_file_must_be_there(receiver, sent) -> None:
    bucket = sent({"model.norm.weight": torch.randn(16)})
    for load in (False, True):
        receiver.begin(manifest=manifest(), staging="bucket")
        stage(receiver, **bucket.argument())
        if load:
            receiver._load()
        with refused("receiver.twice", about="model.norm.weight"):
            stage(receiver, **bucket.argument())
    other = {"model.layers.1.mlp.experts.0.up_proj.weight": torch.randn(8, 16)}  # of the other rank
    receiver.begin(manifest=manifest())
    stage(receiver, **(sent(other).argument() | {"fd_path": "/nowhere"}))
    for change, code in (({"fd_path": "/proc/self/fd/999"}, "bucket.gone"), ({"size": 4096}, "bucket.size")):
        receiver.abort()
        receiver.begin(manifest=manifest())
        argument = bucket.argument() | change
        with refused(code, about=argument["fd_path"]):
            stage(receiver, **argument)


def test_publications_begin_one_at_a_time_and_never_go_back(receiver, sent) -> None:
    bucket = sent({"model.norm.weight": torch.randn(16)})
    with refused("receiver.not_open", about="version 1"):
        stage(receiver, **bucket.argument())
    receiver.begin(manifest=manifest(1, epoch=3))
    for change, about in (({"version": 2}, "version 2"), ({"epoch": 4}, "version 1")):
        with refused("receiver.not_open", about=about):
            stage(receiver, **(bucket.argument(1, 3) | change))
    with refused("receiver.open", about="version 1 of actor (epoch 3)"):
        receiver.begin(manifest=manifest(2, epoch=3))
    with refused("receiver.late", about="version 2 of actor (epoch 2)"):
        receiver.begin(manifest=manifest(2, epoch=2))
    stage(receiver, **bucket.argument(1, 3))
    assert receiver.begin(manifest=manifest(2, epoch=4))["staged"] == 0
    receiver.abort(), receiver.abort()
    receiver.begin(manifest=manifest(2, epoch=4))
    with refused("receiver.not_open", about="version 3"):
        receiver.commit(version=3)


@pytest.mark.parametrize(
    ("change", "code", "about"),
    [
        ({"rule": "int3"}, "receiver.manifest", "rule"),
        ({"encoding": "gguf"}, "manifest.value", "encoding"),
        ({"color": "red"}, "manifest.key", "color"),
        ({}, "receiver.manifest", "staging"),
    ],
)
def test_manifests_that_are_not_understood_are_refused(receiver, change: dict, code: str, about: str) -> None:
    with refused(code, about=about):
        receiver.begin(manifest=manifest() | change, staging="model" if change else "row")
    assert receiver.status()["open"] is None


def test_names_that_reach_not_all_parameters_are_refused_at_the_beginning(model, receiver) -> None:
    model.model.adapter = torch.nn.Linear(2, 2, bias=False)
    with refused("receiver.uncovered", about="model.adapter.weight"):
        receiver.begin(manifest=manifest())
    receiver.begin(manifest=manifest(encoding="local"))


def test_nothing_is_copied_before_everything_is_staged(model, receiver, sent) -> None:
    with refused("receiver.nothing_staged", about="load"):
        receiver._load()
    weights = checkpoint(LAYOUT)
    del (
        weights["model.layers.1.mlp.experts.7.down_proj.weight"],
        weights["model.layers.1.mlp.experts.2.down_proj.weight"],
    )
    before = held(model)
    receiver.begin(manifest=manifest())
    stage(receiver, **sent(weights).argument())
    # Expert 2 is the other rank's.
    status = receiver.status()
    assert (status["missing"], status["first_missing"]) == (1, "model.layers.1.mlp.experts.7.down_proj.weight")
    with refused("receiver.not_staged", about=status["first_missing"]):
        receiver._load()
    assert "error" in outcome(model)
    assert all(torch.equal(before[name], value) for name, value in held(model).items())
    with refused("receiver.never_published", about="verify"):
        receiver.verify()


def test_a_part_of_the_tensors_is_not_verified(model, receiver, sent) -> None:
    weights = checkpoint(LAYOUT)
    receiver.begin(manifest=manifest(), staging="bucket")
    last = {"lm_head.weight": weights.pop("lm_head.weight")}
    stage(receiver, **sent(weights).argument())
    assert "error" not in outcome(model)
    assert receiver.verify()["missing"] == ["lm_head.weight"]
    with refused("receiver.not_verified", about="version 1 of actor (epoch 0)"):
        receiver.commit(version=1)
    stage(receiver, **sent(last).argument())
    with refused("receiver.not_verified", about="version 1 of actor (epoch 0)"):
        receiver.commit(version=1)
    assert "error" not in outcome(model) and receiver.verify()["missing"] == []
    receiver.commit(version=1)


def test_a_loader_that_fails_is_reported_and_ends_the_publication(model, receiver, sent) -> None:
    weights = checkpoint(LAYOUT)
    receiver.begin(manifest=manifest())
    stage(receiver, **sent(weights).argument())
    model.load_weights = lambda named: next(iter(named)) and 1 / 0
    result = outcome(model)
    assert result["loaded"] == 0 and result["error"].startswith("ZeroDivisionError: ")
    assert receiver.status()["open"] is None
    # Nothing vouches for what it holds now, not even an earlier publication.
    assert set(receiver.verify()["missing"]) == set(receiver.copied.layout.local)


def test_a_change_behind_its_back_is_named(model, receiver, sent) -> None:
    receiver.begin(manifest=manifest())
    stage(receiver, **sent(checkpoint(LAYOUT)).argument())
    assert "error" not in outcome(model) and receiver.verify()["differ"] == []
    receiver.commit(version=1)
    model.get_parameter("model.layers.1.mlp.experts.w13_weight").data[2, 9, 3] += 1
    assert receiver.verify()["differ"] == ["model.layers.1.mlp.experts.6.up_proj.weight"]


def test_a_parameter_put_in_place_of_a_verified_one_is_looked_at(model, receiver, sent) -> None:
    receiver.begin(manifest=manifest())
    stage(receiver, **sent(checkpoint(LAYOUT)).argument())
    assert "error" not in outcome(model)
    norm = model.get_submodule("model.norm")
    norm.weight = torch.nn.Parameter(norm.weight.data.clone(), requires_grad=False)
    assert receiver.verify()["differ"] == []
    norm.weight = torch.nn.Parameter(norm.weight.data + 1, requires_grad=False)
    norm.weight_scale = torch.nn.Parameter(torch.ones(1))
    answer = receiver.verify()
    assert (answer["differ"], answer["missing"]) == (["model.norm.weight"], ["model.norm.weight_scale"])


def test_experts_that_balancing_moved_are_loaded_where_they_are_now(sent) -> None:
    sizes = EngineSizes(tensor=2, expert=2)
    receiver, location = receiver_of(ServerModel(QWEN3, sizes)), expert_location(QWEN3, sizes)
    names = []
    for _ in range(2):
        receiver.experts = location
        forms = receiver.inventory(encoding="hf")["forms"]
        names.append([name for name in forms if "up_proj" in name])
        location.physical_to_logical_map_cpu += 2
    assert [name.split(".")[5] for name in names[0][:4]] == list("0123")
    assert [name.split(".")[5] for name in names[1][:4]] == list("2345")


def test_redundant_copies_are_verified_one_by_one(sent) -> None:
    sizes = EngineSizes(tensor=1, redundant=4)
    layout, model = engine_layout(QWEN3, sizes), ServerModel(QWEN3, sizes)
    receiver = receiver_of(model)
    receiver.experts = expert_location(QWEN3, sizes)
    receiver.begin(manifest=manifest())
    stage(receiver, **sent(checkpoint(layout)).argument())
    assert "error" not in outcome(model) and receiver.verify()["differ"] == []
    model.get_parameter("model.layers.0.mlp.experts.w2_weight").data[9] += 1
    assert receiver.verify()["differ"] == ["model.layers.0.mlp.experts.1.down_proj.weight"]


def test_inventories_list_what_this_rank_takes(receiver) -> None:
    local, hf = (receiver.inventory(encoding=encoding) for encoding in ("local", "hf"))
    assert local["uncovered"] == hf["uncovered"] == {}
    assert local["forms"]["model.layers.1.mlp.experts.w13_weight"] == "float32:4,16,16"
    assert hf["forms"]["model.layers.0.self_attn.q_b_proj.weight"] == "float32:48,12"
    assert [name.split(".")[5] for name in hf["forms"] if "experts" in name and "up" in name][:4] == list("4567")


def test_each_rank_stages_only_its_part_of_a_bucket(receiver, sent) -> None:
    parts = [sent({name: checkpoint(LAYOUT)[name]}).argument() for name in LATENT]
    parts = [{key: part[key] for key in ("fd_path", "size", "tensors")} for part in parts]
    which = {"policy": "actor", "version": 1, "epoch": 0, "bucket": 2}
    for rank, name in enumerate(LATENT):
        receiver.rank = rank
        receiver.begin(manifest=manifest(epoch=rank))
        receiver.stage(**which | {"epoch": rank}, ranks=dict(zip("01", parts, strict=True)))
        assert receiver.open.staged.keys() == {name}
    receiver.rank = 2
    with refused("plugin.bucket", about="bucket 2"):
        receiver.stage(**which, ranks=dict(zip("01", parts, strict=True)))


def test_the_test_of_a_bucket_on_a_gpu_holds_for_one_in_host_memory() -> None:
    """Its calls are those of tests/gpu/test_sharing.py, which no machine without a GPU runs."""
    proves_and_holds(MemoryFile(SIZE), torch.device("cpu"))
