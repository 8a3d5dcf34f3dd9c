"""The trainer of tests/gpu on a pretended GPU: a process of test_pretended_cuda.

    python -m tests.integration.pretended_cuda_rank OUT CASE...

Writes what tests.gpu.trainer_rank writes, OUT/waits.json (where the host would have waited for the GPU) and
OUT/mixed.txt (what the pretence says to a sum over two devices).
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:]
    from tests.integration import pretended_cuda

    pretended_cuda.install()
    import torch

    parallel = pretended_cuda.join()
    from slimx.trainer.device.offload import Offload
    from tests.gpu.trainer_rank import run

    _rotation_of_latent_attention()
    torch.cuda.max_memory_allocated = lambda *args: 0
    Offload.offload = lambda self, *, weights=True: 0  # it moves storage, which a pretended tensor has not
    for name in names:
        run(name, out, parallel)
    _steps_with_host_moments(out)
    parallel.destroy()
    try:
        torch.ones(2, device="cuda") + torch.ones(2)
    except RuntimeError as error:
        (out / "mixed.txt").write_text(str(error))
    (out / "waits.json").write_text(json.dumps(pretended_cuda.WAITS))


def _steps_with_host_moments(out: Path) -> None:
    """Three steps of an Adam whose moments lie on the host, in pieces of a parameter each; what the host waited for."""
    import torch

    from slimx.adapters.megatron.layers import Adam
    from slimx.extras.optimizer_offload.moments import HostMoments
    from tests.integration import pretended_cuda

    def stepped(device: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        drawn = [torch.randn(size, generator=generator) for size in (7, 300, 5, 40)]
        parameters = [torch.nn.Parameter(each.to(device)) for each in drawn]
        optimizer = HostMoments(Adam(parameters, lr=0.01), fraction=1.0, piece_bytes=1)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
            optimizer.step()
        assert not any(moments["exp_avg"].is_cuda for moments in optimizer.state.values())
        return [each.detach().cpu() for each in parameters]

    stream, waits = torch.cuda.current_stream(), []
    wait = type(stream).synchronize
    type(stream).synchronize = lambda self: waits.append(1)
    before = pretended_cuda.WAITS.copy()
    found, expected = stepped("cuda"), stepped("cpu")
    type(stream).synchronize = wait
    said = {
        "alike": all(map(torch.equal, found, expected)),
        "waits": len(waits),
        "copies": {place: n for place, n in (pretended_cuda.WAITS - before).items() if "moments.py" in place},
    }
    (out / "moments.json").write_text(json.dumps(said))


def _rotation_of_latent_attention() -> None:
    """megatron-core's YarnRotaryEmbedding computes its frequencies under `with torch.device(...)`, below what the
    pretence replaces: they are made on the host and moved."""
    import torch
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    build = YarnRotaryEmbedding.__init__

    @functools.wraps(build)
    def init(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        build(self, *args, **{**kwargs, "use_cpu_initialization": True})
        for values in (vars(self), self._buffers):
            moved = {name: value.to("cuda") for name, value in values.items() if isinstance(value, torch.Tensor)}
            values.update(moved)

    YarnRotaryEmbedding.__init__ = init


if __name__ == "__main__":
    main()
