"""Engine groups without servers: what cannot work is refused in one sentence, the rest becomes SGLang's arguments."""

from __future__ import annotations

import asyncio
import importlib.util
import pickle
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import aiohttp.web
import pytest

from slimx.cluster.place import Placement
from slimx.config.rule import broken, rules_in
from slimx.config.schema import Config
from slimx.engines.fleet.group import EngineGroup, placement_of
from slimx.engines.outage import Outage
from slimx.engines.server.keys import bearer
from slimx.engines.server.router import Router
from slimx.engines.server.spec import EngineSpec, NodeShare, server_args, server_env
from slimx.errors import SlimxError
from slimx.extras.rewards import judge
from slimx.extras.served_models.client import FrozenEngine
from slimx.layout.ranks import EngineSizes
from slimx.orchestration.engines.service import refuse_elsewhere
from slimx.reshard.packed import PackedBucket, PackedTensor
from slimx.rollout.client.sending import AnswerError, input_logprobs
from slimx.rules import engines, publish
from slimx.runtime.ports import free_port, is_local
from tests.extras.rewards.reward_stand import context, trajectory
from tests.refusals import invalid, refused

PAIR = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]
SPLIT = {"rollout.routed_experts": False, "rollout.engines": PAIR}
URL = "http://gpu7:30000"


def config_of(**keys: Any) -> Config:
    values: dict[str, Any] = {"run": {"dir": "run"}, "model": {"path": "model"}, "rollout": {"prompts": "none"}}
    for key, value in keys.items():
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = value
    return Config.model_validate(values)


def broken_rules(config: Config, device: str, **facts: Any) -> list[str]:
    """Returns the codes of the rules about engines and devices that the configuration breaks."""
    return [problem.code for problem in broken(rules_in(engines, publish), config.facts | {"device": device} | facts)]


def test_ranks_can_read_a_configuration_with_a_server_that_runs_already() -> None:
    """They get it with every default written out."""
    config = config_of(**{"rollout.engines": [{"urls": [URL]}], "publish.transport": "disk"})
    assert Config.model_validate(config.model_dump(mode="json")) == config


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"rollout.engines": [{"frozen": True, "role": "prefill", "model": "m"}]}, "engines.frozen_role"),
        ({"rollout.engines": [{"frozen": True}]}, "engines.frozen_model"),
        ({"rollout.engines": [{"frozen": True, "model": "m"}]}, "algorithm.engines"),
        ({"rollout.engines": [{"tensor": 4, "nodes": 3}]}, "engines.nodes"),
        ({"rollout.engines": [{"urls": ["gpu7:30000"]}]}, "engines.url"),
        ({"rollout.engines": [{"urls": [URL, URL]}]}, "engines.url_twice"),
        ({"rollout.engines": [{"urls": [URL]}, {"name": "b", "urls": [URL]}]}, "engines.url_in_two_groups"),
        ({"rollout.engines": [{"urls": [URL], "count": 2}]}, "engines.urls_idle_key"),
        ({"rollout.engines": [{"urls": [URL], "sglang": {"log_level": "info"}}]}, "engines.urls_idle_key"),
        ({"rollout.engines": [{"urls": [URL], "role": "prefill"}]}, "engines.urls_prefill"),
        ({"rollout.engines": [{"urls": [URL]}], "publish.transport": "nixl"}, "engines.urls_transport"),
        ({"rollout.engines": [{"urls": [URL]}], "schedule.colocate": True}, "engines.urls_colocate"),
        (
            {"rollout.engines": [{"tensor": 16, "nodes": 2}], "publish.transport": "memory"},
            "engines.nodes_transport",
        ),
        ({"publish.delta": {"every_full": 10}}, "publish.delta_transport"),
        ({"publish.delta": {"every_full": 10}, "publish.transport": "memory"}, "publish.delta_transport"),
        (SPLIT | {"rollout.engines": PAIR[:1]}, "engines.role_missing"),
        (SPLIT | {"rollout.engines": PAIR[1:]}, "engines.role_missing"),
        (SPLIT | {"rollout.engines": [*PAIR, {"name": "c"}]}, "engines.roles_mixed"),
        ({"rollout.engines": PAIR}, "rollout.routed_experts"),
        (SPLIT | {"schedule.colocate": True}, "engines.disaggregated_colocate"),
        (SPLIT | {"schedule.max_staleness": 1}, "engines.disaggregated_stale"),
        (
            SPLIT | {"rollout.engines": [PAIR[0] | {"sglang": {"disaggregation_transfer_backend": "fake"}}, PAIR[1]]},
            "engines.fake_transfer",
        ),
    ],
)
def test_groups_that_cannot_work_are_refused_in_one_sentence(keys: dict[str, Any], code: str) -> None:
    with invalid(code):
        config_of(**keys)


def test_engine_groups_that_serve_together_are_distinguished() -> None:
    judge = {"name": "judge", "frozen": True, "model": "m", "count": 2}
    config = config_of(**{"rollout.engines": [{"name": "a", "tensor": 4}, judge, {"name": "b", "urls": [URL]}]})
    assert [group.name for group in config.served.policy] == ["a", "b"]
    assert [group.name for group in config.served.frozen] == ["judge"]
    assert [(group.servers, group.started) for group in config.rollout.engines] == [(1, 1), (2, 2), (1, 0)]
    assert config_of(**SPLIT).rollout.disaggregated and not config.rollout.disaggregated


def test_groups_are_refused_on_devices_that_cannot_serve_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert broken_rules(config_of(**SPLIT), "cuda") == []
    assert broken_rules(config_of(**SPLIT), "cpu") == ["engines.role_device"] * 2
    many = config_of(**{"rollout.engines": [{"tensor": 4, "count": 3}], "schedule.colocate": True})
    assert broken_rules(many, "cpu") == []
    assert broken_rules(many, "cuda") == ["engines.colocated_ranks"]
    monkeypatch.setattr(engines, "TRANSFER_PACKAGES", {"mooncake": "no_such_package"})
    assert broken_rules(config_of(**SPLIT), "cuda", local_device="cuda") == ["engines.transfer_package"] * 2


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"trainer.world_size": 32}, ["publish.idle_nodes"]),
        ({"trainer.world_size": 8}, []),
        ({"trainer.world_size": 32, "publish.transport": "nixl"}, []),
        ({"trainer.world_size": 32, "cluster.gpu": None}, ["publish.machines"]),
        ({"trainer.world_size": 8, "cluster.gpu": None, "cluster.nodes": 1}, []),
        ({"trainer.world_size": 8, "cluster.gpu": None, "publish.transport": "auto"}, []),
        ({"trainer.world_size": 8, "cluster.gpus_per_node": 4}, ["publish.idle_nodes"]),
    ],
)
def test_nodes_that_one_machines_transport_would_leave_idle_are_refused(changes: dict[str, Any], codes: list[str]):
    keys = {"publish.transport": "cuda_ipc", "schedule.colocate": True, "cluster.gpu": "h100", "cluster.nodes": 4}
    engines = {"rollout.engines": [{"tensor": 4, "count": 2}]}
    assert broken_rules(config_of(**keys | engines | changes), "cuda") == codes


def test_remote_servers_are_refused_by_single_machine_transports() -> None:
    """192.0.2.1 has no machine (RFC 5737). With a Ray cluster only the publisher's machine knows if it is its own."""
    assert (
        is_local("127.0.0.1")
        and is_local("localhost")
        and not is_local("192.0.2.1")
        and not is_local("no.such.invalid")
    )
    memory = {"publish.transport": "memory"}
    assert broken_rules(config_of(**{"rollout.engines": [{"urls": ["http://127.0.0.1:8000"]}]}, **memory), "cpu") == []
    far: dict[str, Any] = {"rollout.engines": [{"urls": ["http://127.0.0.1:8000", "http://192.0.2.1:8000"]}]} | memory
    assert broken_rules(config_of(**far), "cpu") == ["engines.urls_elsewhere"]
    assert broken_rules(config_of(**far | {"publish.transport": "disk"}), "cpu") == []
    assert broken_rules(config_of(**far, **{"cluster.ray_address": "auto"}), "cpu") == []
    assert config_of(**far).served.external_hosts == {"actor-0": "127.0.0.1", "actor-1": "192.0.2.1"}
    refuse_elsewhere("memory", "10.0.0.1", {})
    with refused("publish.reach", about="actor-1"):
        refuse_elsewhere("memory", "10.0.0.1", {"actor-1": "10.0.0.2"})


async def test_a_group_starts_after_the_newest_epoch_of_its_servers() -> None:
    """A server that runs already refuses what is older than the publications of the run before."""

    async def done(*_: Any) -> None: ...

    def engine(*epochs: int) -> SimpleNamespace:
        return SimpleNamespace(start=done, attestation=[{"epoch": epoch} for epoch in epochs])

    router = SimpleNamespace(start=lambda: None, wait_ready=done)
    for started, epoch in (([engine(-1, 4), engine()], 5), ([engine(-1), engine()], 2)):
        members = SimpleNamespace(epoch=2)
        await EngineGroup.start(SimpleNamespace(start_deadline_s=1, router=router, engines=started, members=members))
        assert members.epoch == epoch


# Arguments ----------------------------------------------------------------------------------------------------------

GPU = EngineSpec("e", "/model", "bfloat16", "cuda", 31000)


def test_roles_machines_and_turns_become_arguments_of_the_server() -> None:
    prefill = server_args(replace(GPU, role="prefill", bootstrap_port=31001))
    assert prefill["disaggregation_mode"] == "prefill" and prefill["disaggregation_bootstrap_port"] == 31001
    decode = server_args(replace(GPU, role="decode"))
    assert decode["disaggregation_mode"] == "decode" and "disaggregation_bootstrap_port" not in decode
    wide = server_args(
        replace(GPU, sizes=EngineSizes(tensor=16), node=NodeShare(1, 2, "10.0.0.1:31002", ("10.0.0.1", "10.0.0.2")))
    )
    assert (wide["nnodes"], wide["node_rank"], wide["dist_init_addr"]) == (2, 1, "10.0.0.1:31002")
    assert server_args(replace(GPU, sleeps=True))["enable_memory_saver"] is True
    assert "enable_memory_saver" not in server_args(replace(GPU, sleeps=True, device="cpu"))
    assert server_env(replace(GPU, gpus=("4", "5")))["CUDA_VISIBLE_DEVICES"] == "4,5"
    check = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"
    assert server_env(replace(GPU, sleeps=True))[check] == "0" and check not in server_env(GPU)
    graphs = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
    assert server_env(replace(GPU, sleeps=True))[graphs] == "true" and graphs not in server_env(GPU)
    assert graphs not in server_env(replace(GPU, sleeps=True, device="cpu"))
    frozen = server_args(replace(GPU, frozen=True))
    assert not {"custom_weight_loader", "enable_deterministic_inference"} & frozen.keys()
    with refused("sglang.taken", about="rollout.engines.sglang.nnodes"):
        server_args(replace(GPU, node=NodeShare(0, 2, "a:1", ()), sglang={"nnodes": 3}))
    assert replace(GPU, host="fd00::1").url == "http://[fd00::1]:31000"


def test_user_variables_override_those_of_gpu_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    precompile, warmup, nccl = (
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE",
        "SGLANG_JIT_DEEPGEMM_FAST_WARMUP",
        "NVSHMEM_DISABLE_NCCL",
    )
    swiglu = "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"
    for name in (precompile, warmup, nccl, swiglu):
        monkeypatch.delenv(name, raising=False)
    deep_ep = replace(GPU, sglang={"moe_a2a_backend": "deepep"})
    variables = server_env(deep_ep)
    assert [variables[name] for name in (precompile, warmup, nccl, swiglu)] == ["false", "true", "1", "0"]
    assert nccl not in server_env(GPU) and swiglu not in server_env(replace(GPU, frozen=True))
    assert not {precompile, warmup} & server_env(replace(GPU, precompile=True)).keys()
    assert not {precompile, warmup, nccl, swiglu} & server_env(replace(deep_ep, device="cpu", dtype="float32")).keys()
    for name in (precompile, nccl, swiglu):
        monkeypatch.setenv(name, "1")
    variables = server_env(deep_ep)
    assert precompile not in variables and nccl not in variables and variables[warmup] == "true"
    assert variables[swiglu] == "0", "no publication would find what it brought"


def test_variables_of_servers_are_those_that_sglang_reads() -> None:
    package = importlib.util.find_spec("sglang").submodule_search_locations[0]
    declared = Path(package, "srt", "environ.py").read_text()
    names = server_env(replace(GPU, sleeps=True, sglang={"moe_a2a_backend": "deepep"}))
    names |= server_env(replace(GPU, node=NodeShare(0, 2, "a:1", ("a",)), dtype="float32"))
    for name in names:
        assert not name.startswith("SGLANG_") or re.search(rf"^    {name} = ", declared, re.MULTILINE), name


def test_each_rank_gets_the_path_of_the_bucket_on_its_machine() -> None:
    tensor = PackedTensor("w", "float32", (1,), 0, 4, 7)
    bucket = PackedBucket("here", 64, ((tensor,),), others=("there",))
    parts = bucket.parts("hf", 4)
    assert [parts[str(rank)]["fd_path"] for rank in range(4)] == ["here", "here", "there", "there"]
    assert all(part["tensors"] == [tensor.to_json()] for part in parts.values())
    local = replace(bucket, targets=((tensor,), ())).parts("local", 2)
    assert local["0"]["fd_path"] == "here" and local["1"] == {"fd_path": "there", "size": 64, "tensors": []}
    assert replace(bucket, others=()).parts("hf", 4).keys() == {"all"}


def test_a_server_shares_the_gpus_of_trainer_ranks_of_one_machine() -> None:
    ranks = [Placement("n0", ("0",)), Placement("n0", ("1",)), Placement("n1", ("0",))]
    shared = placement_of(ranks[:2], "actor")
    assert shared == Placement("n0", ("0", "1"))
    assert replace(shared, node=None).options(1)["runtime_env"] == {"env_vars": {"CUDA_VISIBLE_DEVICES": "0,1"}}
    assert "runtime_env" not in Placement(owned=2).options(1)
    with refused("engines.shared_gpus", about="actor"):
        placement_of(ranks[1:], "actor")


# The router and hooks -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def servers(count: int) -> AsyncIterator[tuple[list[str], list[tuple[int, dict[str, Any], str | None]]]]:
    """Yields servers that answer as SGLang does, and the requests that they got: number of the server, body, key."""
    requests: list[tuple[int, dict[str, Any], str | None]] = []

    def app(number: int) -> aiohttp.web.Application:
        async def answer(request: aiohttp.web.Request) -> aiohttp.web.Response:
            if request.method == "POST":
                # The first of several, as Starlette reads it in SGLang.
                requests.append((number, await request.json(), request.headers.get("Authorization")))
            if request.path == "/v1/chat/completions":
                return aiohttp.web.json_response({"choices": [{"message": {"content": "9 of 10"}}]})
            if request.path == "/classify":
                return aiohttp.web.json_response([{"embedding": [0.5]}])
            return aiohttp.web.json_response({"text": str(number), "model_path": "m", "meta_info": {"id": "x"}})

        made = aiohttp.web.Application()
        made.router.add_route("*", "/{path:.*}", answer)
        return made

    async with AsyncExitStack() as stack:
        urls = []
        for number in range(count):
            runner = aiohttp.web.AppRunner(app(number))
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
            urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        yield urls, requests


async def test_a_request_goes_to_a_prefill_and_a_decode_server(tmp_path: Path) -> None:
    """The real router, servers that only listen."""
    router = Router(free_port(), free_port(), tmp_path / "log", disaggregated=True)
    async with servers(2) as (urls, requests):
        router.start()
        try:
            await router.wait_ready(300)
            await router.add(urls[0], role="prefill", bootstrap_port=8999)
            await router.add(urls[1], role="decode")
            assert {worker["url"]: worker["worker_type"] for worker in await router.workers()} == {
                urls[0]: "prefill",
                urls[1]: "decode",
            }
            requests.clear()
            async with (
                aiohttp.ClientSession(headers=bearer(router.keys.api_key)) as session,
                session.post(f"{router.url}/generate", json={"input_ids": [1, 2], "sampling_params": {}}) as response,
            ):
                assert (await response.json())["text"] == "1", "the decode server's answer counts"
        finally:
            await router.stop()
    assert sorted(number for number, _, _ in requests) == [0, 1]
    assert {body["bootstrap_port"] for _, body, _ in requests} == {8999}
    assert len({body["bootstrap_room"] for _, body, _ in requests}) == 1
    assert {key for _, _, key in requests} == {f"Bearer {router.keys.api_key}"}


def test_scores_are_those_of_the_requested_tokens() -> None:
    scored = [
        [None, 5, None],
        [-1.0, 0, None],
        [-2.0, 6, None],
    ]  # 0: the vocabulary's last token
    assert input_logprobs({"input_token_logprobs": scored}, [5, 127, 6], "e") == [-1.0, -2.0]
    for tokens in ([5, 127, 7], [5, 127], [5, 127, 6, 1]):
        with refused("answer.scores", about="e"):
            input_logprobs({"input_token_logprobs": scored}, tokens, "e")


async def test_a_judge_is_served_by_an_engine_of_the_run() -> None:
    async with servers(1) as (urls, _):
        engines = {"judge": FrozenEngine("judge", urls[0], deadline_s=300, retries=0)}
        ctx = replace(context("9", "9"), engines=engines)
        assert await judge.reward(ctx, trajectory(), engine="judge", pattern=r"(\d+) of") == 0.9
        with refused("reward.engine", about="jury"):
            await judge.reward(ctx, trajectory(), engine="jury")


async def test_hooks_ask_a_frozen_model_from_any_event_loop() -> None:
    async with servers(1) as (urls, requests):
        looks: list[str] = []

        async def look() -> None:
            looks.append("look")

        engine = FrozenEngine("judge", urls[0], deadline_s=300, retries=1, look=look)
        messages = [{"role": "user", "content": "How good is 9?"}]
        assert await engine.chat(messages, temperature=0.0) == "9 of 10"
        assert await asyncio.to_thread(asyncio.run, engine.chat(messages)) == "9 of 10"
        assert requests[0][1]["messages"] == messages and requests[0][1]["temperature"] == 0.0
        assert await engine.post("/classify", {"text": "x"}) == {"data": [{"embedding": [0.5]}]}
        with refused("answer.scores", about="frozen engines judge"):
            await engine.logprobs([1, 2, 3])
        copy = pickle.loads(pickle.dumps(engine))  # as a reward in a process of its own gets it
        assert await asyncio.to_thread(asyncio.run, copy.chat(messages)) == "9 of 10"
        breaking = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with breaking:
            url = f"http://127.0.0.1:{breaking.sockets[0].getsockname()[1]}"
            gone = FrozenEngine("judge", url, deadline_s=300, retries=1, look=look)
            with pytest.raises(AnswerError) as caught:
                await asyncio.to_thread(asyncio.run, gone.chat(messages))
        assert caught.value.status == 0
        assert looks == ["look"], "a lost server is looked for before a request is sent again"
        outage = Outage()
        outage.begin()
        waits = FrozenEngine("judge", urls[0], deadline_s=3, retries=0, look=look, outage=outage)
        waiting = asyncio.create_task(asyncio.to_thread(asyncio.run, waits.chat(messages)))
        await asyncio.sleep(3.3)
        assert not waiting.done(), "longer than its deadline"
        outage.end()
        assert await waiting == "9 of 10"
        lost = FrozenEngine(
            "judge", urls[0], deadline_s=300, retries=1, look=look, failure=lambda: SlimxError("no engine is left")
        )
        with refused("frozen.lost", about="judge"):
            await lost.chat(messages)
