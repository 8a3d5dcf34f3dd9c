"""Keys of a run's servers: requests without them are refused, and no argument, environment or log shows them."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import aiohttp.web
import psutil
import pytest

from slimx.config.sections.engines import Engines
from slimx.config.sections.rollout import Rollout
from slimx.engines.fleet.group import keys_of
from slimx.engines.server.attestation import check_guarded
from slimx.engines.server.http_calls import ControlClient
from slimx.engines.server.keys import NO_KEYS, Keys, bearer
from slimx.engines.server.router import Router
from slimx.engines.server.spec import EngineSpec, server_args, server_argv, server_env
from slimx.errors import SlimxError
from slimx.extras.served_models.client import FrozenEngine
from slimx.reshard.transports.memory import MemoryFile, open_memory
from slimx.runtime.ports import free_port
from slimx.runtime.process import SupervisedProcess
from tests.refusals import invalid

SPEC = EngineSpec("e", "/model", "float32", "cpu", 31000)


def test_every_server_gets_unique_keys_and_never_shows_them() -> None:
    assert len({SPEC.keys.api_key, SPEC.keys.admin_api_key, replace(SPEC, keys=Keys.random()).keys.api_key}) == 3
    shown = f"{SPEC!r} {server_argv(SPEC)} {server_env(SPEC)} {server_args(SPEC)}"
    assert SPEC.keys.api_key not in shown and SPEC.keys.admin_api_key not in shown


def test_a_key_may_begin_with_a_dash() -> None:
    assert Keys("-a", "--b").flags() == ["--api-key=-a", "--admin-api-key=--b"] and NO_KEYS.flags() == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"api_key": "k"}, "engine.key_on_command_line"),
        ({"admin_api_key": "k"}, "engine.key_on_command_line"),
        ({"ssl_keyfile_password": "k"}, "engine.key_on_command_line"),
        ({"tokenizer_worker_num": 2}, "engine.unguarded"),
    ],
)
def test_arguments_that_show_keys_or_serve_without_are_refused(arguments: dict[str, object], code: str) -> None:
    with pytest.raises(SlimxError) as error:
        server_args(replace(SPEC, sglang=arguments))
    assert (error.value.code, error.value.about) == (code, next(iter(arguments)))


def test_a_file_of_keys_must_be_its_owners_alone(tmp_path: Path) -> None:
    file, keys = tmp_path / "keys", Keys.random()
    file.write_bytes(keys.to_bytes())
    file.chmod(0o644)
    with pytest.raises(SlimxError) as error:
        Keys.read(str(file))
    assert (error.value.code, error.value.about) == ("keys.mode", str(file))
    file.chmod(0o600)
    assert Keys.read(str(file)) == keys
    for text in ("secret", '{"key": "secret"}', '["secret"]'):
        file.write_text(text)
        with pytest.raises(SlimxError) as error:
            Keys.read(str(file))
        assert error.value.code == "keys.form" and "secret" not in str(error.value)
    with pytest.raises(SlimxError) as error:
        Keys.read(str(tmp_path / "none"))
    assert error.value.code == "keys.file"


def test_keys_of_servers_that_run_already_are_named_by_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Engines(urls=("http://h:1",), api_key_env="SERVED_KEY")
    with pytest.raises(SlimxError) as error:
        keys_of(group)
    assert (error.value.code, error.value.about) == ("keys.variable", "SERVED_KEY")
    monkeypatch.setenv("SERVED_KEY", "k")
    assert keys_of(group) == Keys("k") and keys_of(group).control == "k"
    assert keys_of(Engines(urls=("http://h:1",))) == NO_KEYS
    with invalid("engines.keys_without_urls", about="rollout.engines"):
        Rollout(prompts="p", engines=(Engines(api_key_env="SERVED_KEY"),))


def test_keys_are_in_neither_arguments_nor_environment_of_a_process(tmp_path: Path) -> None:
    keys = Keys.random()
    code = (
        "import time; from slimx.engines.server.keys import Keys; "
        "print(Keys.read('-').api_key, flush=True); time.sleep(60)"
    )
    process = SupervisedProcess("p", [sys.executable, "-c", code], tmp_path / "log", stdin=keys.to_bytes())
    process.start()
    try:
        while keys.api_key not in process.tail():
            assert process.poll() is None, process.tail()
        root = psutil.Process(process.pid)
        for member in (root, *root.children(recursive=True)):
            seen = " ".join([*member.cmdline(), *member.environ().values()])
            assert keys.api_key not in seen and keys.admin_api_key not in seen
    finally:
        process.stop(1)


@asynccontextmanager
async def server(asks: set[str], key: str) -> AsyncIterator[str]:
    """Answers everything, but asks for `key` at the paths `asks`."""

    async def answer(request: aiohttp.web.Request) -> aiohttp.web.Response:
        refused = request.path in asks and request.headers.get("Authorization") != f"Bearer {key}"
        return aiohttp.web.json_response({"error": "Unauthorized"} if refused else {}, status=401 if refused else 200)

    app = aiohttp.web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_server_that_answers_strangers_is_refused() -> None:
    both = {"/model_info", "/weights_checker"}
    for asks in ({"/model_info"}, {"/weights_checker"}):
        async with server(asks, "k") as url:
            with pytest.raises(SlimxError) as error:
                await check_guarded(ControlClient(url, keys=Keys("k", "k")))
        assert error.value.code == "engine.unguarded" and {error.value.about} == both - asks
    async with server(both, "k") as url:
        await check_guarded(ControlClient(url, keys=Keys("k", "k")))


async def test_a_wrong_key_is_named_as_the_reason() -> None:
    async with server({"/pause_generation", "/server_info"}, "k") as url:
        for keys in (NO_KEYS, Keys("other", "another")):
            with pytest.raises(SlimxError) as error:
                await ControlClient(url, keys=keys).call("/pause_generation")
            assert (error.value.code, error.value.about) == ("engine.key", "/pause_generation")
        await ControlClient(url, keys=Keys("generation", "k")).call("/pause_generation")
        await ControlClient(url, keys=Keys("k")).call("/pause_generation")  # SGLang's rule for a server with one key
        await ControlClient(url, keys=Keys("k", "admin")).call("/server_info", method="GET", key="k")


async def test_the_router_refuses_every_request_without_its_key(tmp_path: Path) -> None:
    router = Router(free_port(), free_port(), tmp_path / "log")
    async with server({"/generate", "/server_info"}, router.keys.api_key) as url:
        router.start()
        try:
            await router.wait_ready(60)
            await router.add(url)
            attempts = [
                ("POST", "/generate", {"input_ids": [1], "sampling_params": {}}),
                ("POST", "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "a"}]}),
                ("POST", "/workers", {"url": "http://127.0.0.1:9"}),
                ("GET", "/workers", None),
                ("DELETE", f"/workers/{(await router.workers())[0]['id']}", None),
                ("POST", "/flush_cache", None),
            ]
            for key in (None, "wrong", router.keys.admin_api_key):
                async with aiohttp.ClientSession(router.url, headers=bearer(key)) as stranger:
                    for method, path, body in attempts:
                        async with stranger.request(method, path, json=body) as answer:
                            assert answer.status == 401, (method, path)
            assert [worker["url"] for worker in await router.workers()] == [url]
            async with (
                aiohttp.ClientSession(headers=bearer(router.keys.api_key)) as session,
                session.post(f"{router.url}/generate", json=attempts[0][2]) as answer,
            ):
                assert answer.status == 200
            root = psutil.Process(router.process.pid)
            for member in (root, *root.children(recursive=True)):
                assert router.keys.api_key not in " ".join(member.cmdline())
        finally:
            await router.stop()


async def test_a_frozen_engines_key_goes_with_it_to_other_processes() -> None:
    async with server({"/v1/rerank"}, "k") as url:
        engine = FrozenEngine("judge", url, deadline_s=300, retries=0, api_key="k")
        copy, arguments = engine.__reduce__()
        for client in (engine, copy(*arguments)):
            assert await client.post("/v1/rerank", {}) == {} and client.headers == bearer("k")


def test_only_buckets_of_a_run_are_opened_as_buckets(tmp_path: Path) -> None:
    memory = MemoryFile(8)
    assert len(open_memory(memory.path, 8, private=True)) == 8
    version = tmp_path / "version-000001"
    version.mkdir()
    bucket = version / "bucket-00000.safetensors"
    bucket.write_bytes(bytes(8))
    assert len(open_memory(str(bucket), 8, private=True)) == 8

    plain, fifo, link = tmp_path / "weights.safetensors", version / "bucket-00001.safetensors", version / "link"
    plain.write_bytes(bytes(8))
    os.mkfifo(fifo)  # opening it would wait for a writer for ever
    link.symlink_to("/etc/passwd")
    link = link.rename(version / "bucket-00002.safetensors")
    other = os.memfd_create("other")
    with plain.open("rb") as file:
        for path in (
            "/etc/passwd",
            str(plain),
            str(fifo),
            str(link),
            f"{version}/../../../etc/passwd",
            f"/proc/self/fd/{file.fileno()}",
            f"/proc/self/fd/{other}",
            "/proc/self/mem",
        ):
            with pytest.raises(SlimxError) as error:
                open_memory(path, 8, private=True)
            assert (error.value.code, error.value.about) == ("bucket.foreign", path)
    os.close(other)
