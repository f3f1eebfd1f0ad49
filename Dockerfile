# pdtransfer in a container: CPU by default, any user but root.
#   docker build -t pdtransfer .
#   docker build -t pdtransfer --build-arg BASE=<an image with CUDA and Python 3.11 or later> --build-arg TORCH=cu130 .
# Daemons of one host meet over loopback, and over a socket in a directory that both see:
#   docker run --init --network host -v pdtransfer-run:/run/pdtransfer pdtransfer decode
#   docker run --init --network host -v pdtransfer-run:/run/pdtransfer pdtransfer prefill
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
# Which build of torch: cpu, auto, or one of CUDA's as uv names them.
ARG TORCH=cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/pdtransfer && /opt/pdtransfer/bin/pip install --no-cache-dir uv
RUN /opt/pdtransfer/bin/uv pip install --no-cache --python /opt/pdtransfer/bin/python --torch-backend=${TORCH} "torch>=2.9,<3"
WORKDIR /src
COPY pyproject.toml README.md ./
COPY kernels kernels
COPY proto proto
COPY pdtransfer pdtransfer
RUN /opt/pdtransfer/bin/pip install --no-cache-dir . && /opt/pdtransfer/bin/pip uninstall --yes uv
# The native copy is compiled here, for any CPU of this architecture, so that the image needs no compiler.
RUN PDTRANSFER_CACHE=/var/cache/pdtransfer /opt/pdtransfer/bin/python -c \
    "import sys; from pdtransfer.kernels import load; native = load(); print(native.text); sys.exit(not native.used)"

FROM ${BASE}
RUN useradd --system --uid 10001 --create-home pdtransfer \
    && install -d -o pdtransfer -g pdtransfer -m 0700 /run/pdtransfer
COPY --from=build --chown=pdtransfer:pdtransfer /var/cache/pdtransfer /var/cache/pdtransfer
COPY --from=build /opt/pdtransfer /opt/pdtransfer
ENV PATH=/opt/pdtransfer/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PDTRANSFER_CACHE=/var/cache/pdtransfer \
    PDTRANSFER_SOCKET_DIRECTORY=/run/pdtransfer
USER pdtransfer
WORKDIR /home/pdtransfer
ENTRYPOINT ["pdtransfer"]
CMD ["--help"]
