"""A run in an environment that is made for other programs: proxies, launchers' variables, modules of its own names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.runs import TrainProcess, completed_steps, write_config
from tools import house

pytestmark = pytest.mark.integration
NOBODY = "http://127.0.0.1:9"
ELSEWHERE = "10.255.255.1"

HOSTILE = {
    **dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy"), NOBODY),
    "ALL_PROXY": "socks5://127.0.0.1:9",
    "no_proxy": "example.com",
    **{"MASTER_ADDR": ELSEWHERE, "MASTER_PORT": "1", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"},
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    **{"RAY_ADDRESS": f"{ELSEWHERE}:6379", "RAY_NAMESPACE": "other"},
    **{"OMP_NUM_THREADS": "x", "CUDA_VISIBLE_DEVICES": "abc"},
    **{"GLOO_SOCKET_IFNAME": "nosuch0", "NCCL_SOCKET_IFNAME": "nosuch0"},
    **{"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "true", "SGLANG_USE_CPU_ENGINE": "0"},
    **{"SGLANG_HOST_IP": ELSEWHERE, "HOST_IP": ELSEWHERE},
    **{"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": NOBODY, "HF_HOME": "/nosuch/home"},
    **{"PYTHONSTARTUP": "/nosuch.py", "LANG": "C", "LC_ALL": "C"},
}
REWARD = """
async def reward(ctx, trajectory):
    return sum(character.isdigit() for character in ctx.text) / max(1, len(ctx.text))
"""


@pytest.mark.costly("starts every part of a run as a program, with its imports")
def test_variables_and_modules_of_other_programs_change_nothing(
    tiny_model: Path, task_of_sums: Path, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        task_of_sums / "train.jsonl",
        # The reward is imported in a process of its own, from the working directory.
        reward={"function": "my_reward.reward", "isolation": "process", "workers": 1},
        schedule={"steps": 1},
        track={"report": True, "tensorboard": True},
    )
    here = tmp_path / "here"
    (here / "slimx").mkdir(parents=True)
    (here / "torch.py").write_text("raise RuntimeError('torch of the working directory')")
    (here / "my_reward.py").write_text(REWARD)
    program = [str(Path(sys.executable).with_name("slimx"))]
    imports = tmp_path / "imports"
    imports.mkdir()
    run = TrainProcess(config, program=program, directory=here, variables=HOSTILE | house.record_imports(imports))
    assert run.wait() == 0, run.text()
    assert completed_steps(tmp_path / "run") == 1
    run.assert_nothing_left()
    # The only run of these tests in which every process imports what it needs.
    loaded = house.recorded_imports(imports)
    assert {"slimx.cli", "slimx.trainer.trainer", "slimx.adapters.sglang.plugin", "slimx.rewards.needs"} <= loaded
    assert len(loaded) <= house.LOADED, sorted(loaded)
