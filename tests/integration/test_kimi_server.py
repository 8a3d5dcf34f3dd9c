"""A server of Kimi-K2.5 starts as on GPUs, where SGLang sends it an image, and takes images from other clients."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from slimx.engines.server.engine import Engine
from slimx.engines.server.spec import EngineSpec
from tests.extras.vision.picture_stand import picture
from tests.integration.conftest import START_S
from tests.integration.engine_families import make_model

pytestmark = pytest.mark.integration


@pytest.mark.slow("a server for one request")
async def test_a_kimi_server_takes_text_with_images(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model("kimi_k25", model)
    spec = EngineSpec("kimi", str(model), "float32", "cpu", max_total_tokens=4096, sglang={"skip_server_warmup": False})
    engine = Engine(spec, tmp_path / "server.log")
    image = {"url": "data:image/png;base64," + base64.b64encode(picture(70, 90)).decode()}
    content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": "1+1="}]
    body = {"model": "kimi", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    try:
        await engine.start(START_S)
        answer = await engine.wire.call("/v1/chat/completions", body, key=engine.spec.keys.api_key)
    finally:
        await engine.stop()
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 3 * 4
    assert answer["usage"]["completion_tokens"] == 4
