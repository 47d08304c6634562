# All that a run needs but the NVIDIA driver, which the host lends. How to build and start it: docs/gpu.md.
# BASE may be any image with apt, Python 3.11 or newer and pip.
ARG BASE=python:3.12-slim
FROM ${BASE}

# NCCL opens libibverbs and the driver of a card at run time; without them it uses TCP between nodes.
RUN apt-get update && apt-get install -y --no-install-recommends ibverbs-providers \
    && rm -rf /var/lib/apt/lists/* && pip install --no-cache-dir uv

RUN useradd --create-home --uid 1000 lab && install -d -o lab /opt/ddp-lab /results
WORKDIR /opt/ddp-lab

# Packages come before the code: their layer changes with uv.lock alone. CUDA's libraries come with torch.
COPY pyproject.toml uv.lock ./
ENV UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy
RUN --mount=type=cache,target=/root/.cache/uv uv sync --frozen --no-dev --no-install-project --compile-bytecode

COPY . .
RUN --mount=type=cache,target=/root/.cache/uv uv sync --frozen --no-dev
ENV PATH=/opt/ddp-lab/.venv/bin:$PATH
USER lab
CMD ["python", "main_ddp.py", "--help"]
