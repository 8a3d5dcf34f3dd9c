"""A stranger on the machine of a real engine: nothing that it asks for is done without the run's keys."""

from __future__ import annotations

import json
import os
import pickle
from base64 import b64encode
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from safetensors.torch import save_file

from slimx.engines.server import server
from slimx.engines.server.engine import NO_TENSORS, Engine, State
from slimx.engines.server.http_calls import RECEIVER
from slimx.engines.server.keys import bearer
from slimx.engines.server.spec import EngineSpec, server_argv
from slimx.errors import SlimxError
from slimx.models.families import read_model
from slimx.rollout.client.generation import GenerationClient, ModelShape
from slimx.rollout.client.request import GenerationRequest
from tests.integration.conftest import START_S, Bucket, Weights, manifest, perturbed, present, publish
from tests.processes import first_address

pytestmark = pytest.mark.integration

PROMPT = [1, 20, 21, 15, 22, 23, 33, 2]
SAMPLING = {"temperature": 0.7, "max_new_tokens": 12, "ignore_eos": True}


def action(name: str, argument: dict[str, Any]) -> dict[str, Any]:
    return {"action": name, "selector": "target", "skip_tensor_list": [json.dumps(argument)]}


def attacks(directory: Path, bucket: Bucket) -> list[tuple[str, dict[str, Any]]]:
    """Returns paths and bodies by which a process that reaches the server could replace its weights, end the run's
    publications, have files opened, or stop it; each is what the run itself would send."""
    part = {"fd_path": "/etc/passwd", "size": 64, "tensors": [bucket.tensors[0].to_json()]}
    stage = {"policy": "actor", "version": 1, "epoch": 10**6, "bucket": 0, "ranks": {"all": part}}
    ones = b64encode(pickle.dumps([("model.norm.weight", torch.ones(64))])).decode()
    return [
        ("/update_weights_from_disk", {"model_path": str(directory)}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [ones], "flush_cache": False}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [NO_TENSORS], "load_format": RECEIVER}),
        ("/update_weights_from_ipc", {"zmq_handles": {}}),
        (
            "/init_weights_update_group",
            {
                "master_address": "127.0.0.1",
                "master_port": 9,
                "rank_offset": 1,
                "world_size": 2,
                "group_name": "g",
                "backend": "gloo",
            },
        ),
        (
            "/update_weights_from_distributed",
            {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "group_name": "g"},
        ),
        ("/weights_checker", action("slimx.begin", {"manifest": manifest(1, epoch=10**6).to_json()})),
        ("/weights_checker", action("slimx.stage", stage)),
        ("/weights_checker", action("slimx.abort", {})),
        ("/weights_checker", action("slimx.attest", {})),
        ("/weights_checker", {"action": "reset_tensors"}),
        ("/begin_weight_update", {"selector": "target"}),
        ("/update_weight_version", {"new_version": "1000000", "abort_all_requests": True}),
        ("/pause_generation", {"mode": "abort"}),
        ("/abort_request", {"abort_all": True}),
        ("/release_memory_occupation", {"tags": ["weights"]}),
        ("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 4}),
        ("/set_internal_state", {"server_args": {"pp_max_micro_batch_size": 8}}),
        ("/start_profile", {}),
        ("/configure_logging", {"dump_requests_folder": str(directory)}),
        ("/flush_cache", {}),
    ]


async def test_a_strangers_control_calls_are_refused_and_change_nothing(
    engine: Engine, tiny_model: Path, tiny_weights: Weights, tmp_path: Path
) -> None:
    """Calls are made without a key, with a wrong one, and with the one that is for generation only."""
    await publish(engine, tiny_weights, 9)
    keys, shape = engine.spec.keys, ModelShape.of(read_model(tiny_model))
    (before,) = await engine.wire.request_ranks("status")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    save_file(perturbed(tiny_weights, 8), tmp_path / "model.safetensors")
    async with GenerationClient(engine.spec.url, shape, api_key=keys.api_key) as client:
        expected = await client.generate(GenerationRequest(PROMPT, SAMPLING, seed=3))
        with Bucket(tiny_weights) as bucket:
            for key in (None, "wrong", keys.api_key):
                async with aiohttp.ClientSession(engine.spec.url, headers=bearer(key)) as stranger:
                    for path, body in attacks(tmp_path, bucket):
                        async with stranger.post(path, json=body) as answer:
                            assert answer.status in (401, 403), (path, key)
        found = await client.generate(GenerationRequest(PROMPT, SAMPLING, seed=3))
    assert found.token_ids.tolist() == expected.token_ids.tolist() and found.versions == [(0, 12, 9)]
    assert await engine.wire.request_ranks("status") == [before]
    assert (await present(engine, 10)).membership_epoch < 10**6, "no stranger's publication has begun"
    await publish(engine, tiny_weights, 10)
    assert engine.state is State.READY


async def test_nobody_generates_without_a_key(engine: Engine, tiny_weights: Weights) -> None:
    """An id outside the vocabulary ends SGLang's scheduler; slimx's own client refuses it before it is sent."""
    await publish(engine, tiny_weights, 11)
    bodies = {
        "/generate": {"input_ids": [10**6], "sampling_params": {"max_new_tokens": 1}},
        "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "1"}]},
        "/v1/completions": {"model": "m", "prompt": "1"},
    }
    async with aiohttp.ClientSession(engine.spec.url) as stranger:
        for path, body in bodies.items():
            async with stranger.post(path, json=body) as answer:
                assert answer.status == 401, path
        for path in ("/server_info", "/model_info"):
            async with stranger.get(path) as answer:
                assert answer.status == 401, path
    await engine.check_health(60)


async def test_the_keys_of_a_server_appear_nowhere(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIMX_TEST_KEYS", "shown")
    spec = EngineSpec("keys", str(tiny_model), "float32", "cpu", max_total_tokens=1024, seed=1)
    engine = Engine(spec, tmp_path / "server.log")

    def spawning(spec: EngineSpec) -> list[str]:
        argv = server_argv(spec)
        argv.insert(argv.index("--"), "--spawn")  # as on GPUs
        return argv

    monkeypatch.setattr(server, "server_argv", spawning)
    try:
        await engine.start(START_S)
        (rank,) = engine.attestation
        parent = psutil.Process(rank["pid"]).parent()
        assert first_address(rank["pid"]) != first_address(parent.pid), "the scheduler was spawned"
        shown = json.dumps(await engine.wire.call("/server_info", method="GET", key=engine.spec.keys.api_key))
        assert str(engine.spec.port) in shown
        process = engine.process
        root = psutil.Process(process.pid)
        tree = [root, *root.children(recursive=True)]
        assert len(tree) >= 4, "guard, server, scheduler, detokenizer"
        variables = [one.environ() for one in tree]
        # Forks and SGLang's processes show none of theirs; a spawn's helper has the server's.
        assert sum(values.get("SLIMX_TEST_KEYS") == "shown" for values in variables) >= 1
        shown += " ".join([*(" ".join(one.cmdline()) for one in tree), *map(str, [process.env, *variables])])
        shown += process.log_path.read_text()
    finally:
        await engine.stop()
    assert spec.keys.api_key not in shown and spec.keys.admin_api_key not in shown


@pytest.mark.parametrize(
    "path", ["/etc/passwd", f"/proc/{os.getpid()}/environ", "/proc/self/mem"], ids=["file", "environment", "memory"]
)
async def test_a_server_opens_nothing_but_buckets_of_the_run(engine: Engine, tiny_weights: Weights, path: str) -> None:
    """Other paths are refused even to the run itself."""
    await publish(engine, tiny_weights, 12)
    with Bucket(tiny_weights) as bucket:
        await engine.begin(await present(engine, 13))
        with pytest.raises(SlimxError) as error:
            await engine.stage(type(bucket.packed)(path, bucket.packed.size, bucket.packed.targets), 0)
    assert (error.value.code, error.value.about) == ("bucket.foreign", path)
    assert [rank["open"] for rank in await engine.wire.request_ranks("status")] == [None], "its publication has ended"
