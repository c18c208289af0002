# The programs in a container: w5xde coordinator ..., w5xde worker ..., as a user that is not root.
#
#   docker build -t w5xde .                                                                   CPU
#   docker build -t w5xde --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .    CUDA
#
# torch's CUDA builds bring CUDA's libraries; the driver is the host's. Where the job needs more of CUDA (nvcc, say), take a
# base that has it: --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04. A base must have apt-get and Python 3.11 or newer.
# Your own image: FROM w5xde, COPY train.py ., and RUN pip install what the job imports.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
# Some bases have a user of that number already.
RUN useradd --non-unique --uid 1000 --create-home w5xde && install -d -o 1000 -g 1000 /job /runs
RUN python3 -m venv /opt/w5xde
ENV PATH=/opt/w5xde/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 HOME=/home/w5xde USER=w5xde

COPY constraints.txt /tmp/w5xde/
RUN pip install --index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple \
        "torch$(sed -n 's/^torch//p' /tmp/w5xde/constraints.txt)"
COPY pyproject.toml README.md LICENSE /tmp/w5xde/
COPY src /tmp/w5xde/src
RUN pip install -c /tmp/w5xde/constraints.txt "/tmp/w5xde[dashboard]" && rm -rf /tmp/w5xde

USER 1000:1000
WORKDIR /job
EXPOSE 5555 5556
STOPSIGNAL SIGTERM
# Of a coordinator, whose dashboard answers; a worker has none, and its coordinator watches it.
HEALTHCHECK --start-period=5m --interval=20s --timeout=10s CMD ["python", "-m", "w5xde_async.launch.health"]
ENTRYPOINT ["w5xde"]
