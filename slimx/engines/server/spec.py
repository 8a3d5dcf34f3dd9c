"""Specification of one engine's server, and the SGLang arguments and environment variables of its process."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import Literal, cast

from slimx.config.schema import Config
from slimx.config.sections.engines import Engines
from slimx.engines.server.arguments import check_server_args, command_line
from slimx.engines.server.http_calls import RECEIVER
from slimx.engines.server.keys import STDIN, Keys
from slimx.errors import SlimxError
from slimx.json_types import Json
from slimx.layout.form import ServedForm, form_of
from slimx.layout.ranks import EngineSizes, engine_sizes
from slimx.numerics.mode import NumericsMode, mode_of
from slimx.runtime.children import python_argv
from slimx.runtime.ports import address, is_loopback
from slimx.runtime.toolkit import NVSHMEM
from slimx.runtime.user_files import private_directory


@dataclass(frozen=True, slots=True)
class NodeShare:
    """One node's part of a server that spans several nodes."""

    rank: int
    """Index of the node; node 0 serves requests."""
    count: int
    init_address: str
    """host:port on node 0 at which the ranks of all nodes rendezvous."""
    peers: tuple[str, ...]
    """Addresses of all nodes of the server; connections from other addresses are dropped."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Specification of one SGLang server, which determines the arguments and the environment of its process."""

    name: str
    model_path: str
    """Directory of the model in Hugging Face format."""
    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    port: int = 0
    """HTTP port; 0 until it is chosen at startup."""
    host: str = "127.0.0.1"
    threads: int = 1
    """Number of CPU threads per rank, for servers on the CPU."""
    max_total_tokens: int | None = None
    """Size of the KV cache in tokens; None lets SGLang choose it."""
    numerics: NumericsMode = NumericsMode()
    """Numerics mode of the server, which determines its kernels; `fast` by default."""
    sizes: EngineSizes = EngineSizes()
    """Parallel sizes of the server."""
    seed: int = 1
    routed_experts: bool = True
    """True if the server can return the experts to which each token was routed (MoE models only)."""
    sglang: Json = field(default_factory=dict)
    """ServerArgs fields that the user sets (`sglang` of the group): name -> value."""
    role: Literal["regular", "prefill", "decode"] = "regular"
    bootstrap_port: int | None = None
    """Port of a prefill server from which decode servers fetch the KV cache; None for other servers."""
    frozen: bool = False
    """True if the model's weights never change, so nothing is published to the server."""
    draft: bool = False
    """True if publications include the weights of the server's draft model."""
    form: ServedForm = ServedForm()
    """Weight form of the served model: plain weights, or weights with adapters."""
    precompile: bool = False
    """True to compile DeepGEMM's kernels before serving (CUDA only)."""
    sleeps: bool = False
    """True if the server releases its memory while trainers use the devices."""
    external: bool = False
    """True if the server was started outside of the run; the run then neither configures nor stops the server."""
    node: NodeShare | None = None
    """This node's part of a server that spans several nodes; None for a server on one node."""
    keys: Keys = field(default_factory=Keys.random, compare=False)
    """API keys that requests to the server must contain."""
    gpus: tuple[str, ...] | None = None
    """GPUs of the server, by index or UUID; if None, all GPUs that are visible to the process that starts the
    server."""

    @property
    def url(self) -> str:
        return f"http://{address(self.host, self.port)}"


def engine_spec(config: Config, group: Engines, name: str, *, device: str, moe: bool) -> EngineSpec:
    """Returns the specification of the server `name` of `group`, as configured. Address, ports and GPUs are set later.

    `moe`: True if the model has experts."""
    return EngineSpec(
        name=name,
        model_path=group.model or config.model.path,
        dtype=config.numerics.dtype,
        device=cast(Literal["cpu", "cuda"], device),
        threads=group.threads,
        max_total_tokens=group.max_total_tokens,
        numerics=NumericsMode() if group.frozen else mode_of(config),
        sizes=engine_sizes(group),
        seed=config.run.seed,
        routed_experts=moe and config.rollout.routed_experts,
        sglang=group.sglang if config.track.prometheus.port is None else {"enable_metrics": True, **group.sglang},
        role=group.role,
        frozen=group.frozen,
        draft=config.publishes_draft(group),
        form=ServedForm() if group.frozen else form_of(config).served(),
        precompile=group.precompile,
        sleeps=config.schedule.colocate and group in config.served.sampling,
    )


def server_args(spec: EngineSpec, where: str = "rollout.engines.sglang") -> Json:
    """Returns SGLang's arguments for the server, ServerArgs field -> value: those that slimx sets, those that the user
    sets, and defaults that the user may override. `where`: the configuration key of the user's arguments, for messages.

    Raises SlimxError if a user's argument is invalid or is one that slimx sets."""
    ours: Json = {
        "model_path": spec.model_path,
        "dtype": spec.dtype,
        "device": spec.device,
        "host": spec.host,
        "port": spec.port,
        "random_seed": spec.seed,
        "max_total_tokens": spec.max_total_tokens,
        "tp_size": spec.sizes.tensor,
        "ep_size": spec.sizes.expert,
        "pp_size": spec.sizes.pipeline,
    }
    if not spec.frozen:
        ours |= policy_args(spec)
    ours |= spec.form.server_arguments(spec.device)
    if spec.sizes.attention_data > 1:
        ours |= {"enable_dp_attention": True, "dp_size": spec.sizes.attention_data}
    if spec.sleeps and spec.device == "cuda":
        ours |= {"enable_memory_saver": True}  # without it, releasing memory would free nothing
    if spec.role != "regular":
        ours |= {"disaggregation_mode": spec.role}
    if spec.bootstrap_port is not None:
        ours |= {"disaggregation_bootstrap_port": spec.bootstrap_port}
    if spec.node is not None:
        ours |= {"nnodes": spec.node.count, "node_rank": spec.node.rank, "dist_init_addr": spec.node.init_address}
    # With incremental output, streamed events contain only new tokens instead of repeating all log-probs.
    defaults: Json = {"log_level": "warning", "incremental_streaming_output": True}
    if not spec.sglang.get("enforce_shared_experts_fusion"):
        # SGLang would decide at runtime, on GPUs and for some models only, but the publication plan is made before.
        defaults["disable_shared_experts_fusion"] = True
    if not spec.frozen and spec.device == "cuda" and spec.dtype == "bfloat16":
        # On Blackwell SGLang would round the KV cache of sparse attention to fp8, which trainers do not.
        defaults["kv_cache_dtype"] = "bf16"
    if spec.device == "cpu" or spec.sleeps:
        # An idle or paused server would otherwise busy-poll on a core that trainers need.
        defaults["sleep_on_idle"] = True
    if spec.device == "cpu":
        ours |= {"disable_cuda_graph": True}
        # Nothing is compiled or captured on the CPU; generation is checked before the first publication.
        defaults["skip_server_warmup"] = True
        # Limits the recurrent states of delta nets, which would otherwise take nearly half of the node's memory.
        defaults["max_mamba_cache_size"] = 256
        defaults["mm_attention_backend"] = "sdpa"  # the others need kernels that are not on PyPI
    ours |= spec.numerics.server_arguments(spec.device)
    check_server_args(spec.sglang, where)
    check_keyless(spec.sglang, where)
    taken = sorted(ours.keys() & spec.sglang.keys())
    if taken:
        raise SlimxError(
            f"{where}.{taken[0]} cannot be set for engine {spec.name}, because slimx sets the argument "
            f"to {ours[taken[0]]!r}; remove the argument",
            code="sglang.taken",
            about=f"{where}.{taken[0]}",
        )
    return defaults | spec.sglang | ours


def check_keyless(args: Json, where: str) -> None:
    """Raises SlimxError if one of the user's arguments would expose a key to other users of the machine, or make SGLang
    ignore keys. `where`: the configuration key that contains `args`, for messages."""
    for name in ("api_key", "admin_api_key", "ssl_keyfile_password"):
        if args.get(name) is not None:
            raise SlimxError(
                f"{where}.{name} would be on the server's command line, which every user of the "
                "machine can read; remove the argument, because slimx generates random keys for each run's servers",
                code="engine.key_on_command_line",
                about=name,
            )
    if args.get("tokenizer_worker_num") not in (None, 1):
        raise SlimxError(
            f"{where}.tokenizer_worker_num is {args['tokenizer_worker_num']}, but SGLang checks "
            "keys only if the value is 1, so any process could replace the weights; set the value to 1",
            code="engine.unguarded",
            about="tokenizer_worker_num",
        )


def policy_args(spec: EngineSpec) -> Json:
    """Returns the SGLang arguments that publications and trainable rollouts require.

    With deterministic inference, SGLang samples according to the request's seed and computes each token identically in
    any batch. On the CPU, SGLang accepts seeds only in this mode. On a GPU, with SGLang's original kernels, the mode
    would disable the tuned kernels and the custom all-reduce; there, the plugin (slimx.adapters.sglang.hooks) passes
    the seeds to the only sampler that accepts them."""
    arguments: Json = {"custom_weight_loader": [RECEIVER], "enable_return_routed_experts": spec.routed_experts}
    if spec.numerics.replaces_layers or spec.device == "cpu":
        arguments["enable_deterministic_inference"] = True
    else:
        arguments["sampling_backend"] = "pytorch"
    return arguments


def server_argv(spec: EngineSpec) -> list[str]:
    """Returns the command line that starts the server with this process's Python interpreter."""
    options = [*spec.numerics.command_line(), *spec.form.command_line()]
    if spec.draft:
        options.append("--publish-draft")
    options += ["--keys", STDIN]
    return python_argv("slimx.engines.server.launch", *options, "--", *command_line(server_args(spec)))


def server_env(spec: EngineSpec) -> dict[str, str]:
    """Returns variables to add to the environment of the server's process."""
    # A server's temporary files are deleted with it (slimx.runtime.process), but torch's compile cache is kept.
    environment = {
        "HF_HUB_OFFLINE": "1",  # models are in local directories
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{private_directory()}/torchinductor"),
    }
    if spec.dtype == "float32":
        environment["SGLANG_MAMBA_CONV_DTYPE"] = "float32"  # SGLang stores inputs of convolutions in bf16 by default
    if is_loopback(spec.host):
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # gloo listens at the address of the host name by default
    if spec.node is not None:
        # SGLang unpickles messages from its sockets. With these variables it drops connections from other hosts.
        environment["SGLANG_ZMQ_ALLOWED_PEERS"] = ",".join(dict.fromkeys(spec.node.peers))
        environment["SGLANG_ZMQ_SOURCE_IP"] = spec.host
    if spec.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
    if spec.sleeps:
        # SGLang would fail if a rank's GPU has a tenth less free memory than another's, which is usual if GPUs are
        # shared with trainers; `slimx plan` has checked the memory.
        environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
    if spec.device == "cuda":
        environment |= {name: value for name, value in cuda_defaults(spec).items() if name not in os.environ}
        if spec.sleeps:
            # Without it, CUDA graphs would stay on the GPU while trainers train. With it, captured all-reduces copy
            # their input.
            environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "true"
        if not spec.frozen:
            # By default SGLang permutes rows of experts after loading, which would make the verification fail.
            environment["SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"] = "0"
    if spec.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["OMP_NUM_THREADS"] = str(spec.threads)
        if spec.sizes.world > 1:
            # SGLang's CPU path refuses several ranks on one NUMA node without explicit cores.
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(_cores(spec))
    return environment


def _cores(spec: EngineSpec) -> list[str]:
    """Returns for each rank a comma-separated list of its CPU cores; cores are assigned in order, starting again from
    the first if there are too few."""
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
    return [",".join(map(str, itertools.islice(cores, spec.threads))) for _ in range(spec.sizes.world)]


def cuda_defaults(spec: EngineSpec) -> dict[str, str]:
    """Returns environment variables for a server on GPUs; a variable that the user's environment sets takes
    precedence."""
    variables: dict[str, str] = {}
    if not spec.precompile:
        # Before a server with fp8 weights is ready, SGLang would compile kernels for every number of tokens up to
        # 16384, which takes 10 to 20 minutes by its own estimate (srt/layers/deep_gemm_wrapper/compile_utils.py).
        variables |= {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false", "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "true"}
    if spec.sglang.get("moe_a2a_backend") == "deepep":
        variables |= NVSHMEM
    return variables
