# slimx with everything that it uses on NVIDIA GPUs: CUDA 13.0, x86_64 (H100, H200, B300) and aarch64 (GB300).
#
#   docker build --tag slimx .
#   docker buildx build --platform linux/arm64 --tag slimx:aarch64 .      # on an aarch64 machine: it compiles for an hour
#   docker run --rm --gpus all --shm-size=16g --ulimit memlock=-1 slimx slimx doctor
#
# The packages are those of requirements/cu130.txt. What has no wheel is compiled here: Transformer Engine's PyTorch
# library, flash-attn and apex. The compiler stays in the image: SGLang's kernels are compiled when they are first used.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# Libraries and tools of InfiniBand and RoCE, which NCCL and DeepEP load; ip and hostname for scripts/launch.
# hadolint ignore=DL3008
RUN apt-get update \
  && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    ca-certificates g++ git make python3.12-dev python3.12-venv hostname iproute2 numactl libnuma1 \
    ibverbs-providers libibverbs1 librdmacm1 rdma-core infiniband-diags \
  && rm -rf /var/lib/apt/lists/*

# Compute capabilities: H100 and H200, B200, B300 and GB300. MAX_JOBS: each job takes up to 8 GB.
ARG MAX_JOBS=8
ENV CUDA_HOME=/usr/local/cuda TORCH_CUDA_ARCH_LIST="9.0;10.0;10.3" NVTE_CUDA_ARCHS="90;100;103" MAX_JOBS=${MAX_JOBS} \
  PIP_NO_CACHE_DIR=1 PATH=/opt/slimx/.venv/bin:$PATH

WORKDIR /opt/slimx
COPY Makefile setup.py pyproject.toml ./
COPY requirements requirements
COPY slimx/extras/install slimx/extras/install
RUN make venv LOCK=cu130 PYTHON=python3.12

# Never the package of this name on PyPI, which is another project. What is needed is the extension that adds a weight
# gradient into an fp32 buffer.
ARG APEX=6424da3b4faa6c8f062da4a48c424fff3f02d42d
RUN git init --quiet /tmp/apex \
  && git -C /tmp/apex fetch --quiet --depth 1 https://github.com/NVIDIA/apex "$APEX" \
  && git -C /tmp/apex checkout --quiet FETCH_HEAD \
  && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD="$MAX_JOBS" \
    python -m pip install --no-deps --no-build-isolation /tmp/apex \
  && rm -rf /tmp/apex \
  && python -c 'import torch, fused_weight_gradient_mlp_cuda'

# The newest that Transformer Engine takes, which wants less than 2.8.4. It compiles as C++17, which torch 2.14's headers refuse, and it writes
# over flash_attn/cute of flash-attn-4, which is therefore installed once more.
ARG FLASH_ATTN=sha256:d0f9f0b08a986cdeadbffcf5ec8b3a8f514366c68ad1853d3ab061bc83cc340b
RUN echo "flash-attn==2.8.3.post2 --hash=$FLASH_ATTN" > /tmp/flash-attn-2.txt \
  && python -m pip download --no-deps --no-build-isolation --no-binary :all: --dest /tmp --require-hashes -r /tmp/flash-attn-2.txt \
  && tar -xzf /tmp/flash_attn-2.8.3.post2.tar.gz -C /tmp \
  && sed -i 's/-std=c++17/-std=c++20/g' /tmp/flash_attn-2.8.3.post2/setup.py \
  && FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS="90;100" \
    python -m pip install --no-deps --no-build-isolation /tmp/flash_attn-2.8.3.post2 \
  && grep '^flash-attn-4==' requirements/cu130.txt > /tmp/flash-attn-4.txt \
  && python -m pip install --no-deps --force-reinstall --require-hashes -r /tmp/flash-attn-4.txt \
  && rm -rf /tmp/flash_attn-2.8.3.post2 /tmp/flash_attn-2.8.3.post2.tar.gz /tmp/flash-attn-*.txt

# Attention kernels of flashinfer for Blackwell, which it would download at the first start: its package flashinfer-cubin
# is on PyPI up to 0.6.13 only. Its own command ends with 0 when a download failed.
ENV FLASHINFER_CUBIN_DIR=/opt/flashinfer-cubins
RUN python -c 'from flashinfer.artifacts import download_artifacts; download_artifacts()' \
  && test -n "$(find "$FLASHINFER_CUBIN_DIR" -name '*.cubin' -print -quit)"

COPY . .
RUN make build LOCK=cu130 PYTHON=python3.12 && python -c 'import slimx.cli'

CMD ["slimx", "doctor"]
