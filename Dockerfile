# pdtransfer in a container: CPU by default, any user but root.
#   docker build -t pdtransfer .
#   docker build -t pdtransfer --build-arg BASE=<an image with CUDA and Python 3.11 or later> --build-arg TORCH=cu130 .
#   docker run --rm --init pdtransfer demo
# Daemons of one host meet over loopback, and over a socket in a directory that both see: deploy/compose.yaml runs them.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
# Which build of torch: cpu, auto, or one of CUDA's as uv names them.
ARG TORCH=cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && (python3 -c 'import ensurepip, venv' || apt-get install -y --no-install-recommends python3-venv) \
    && rm -rf /var/lib/apt/lists/*
# As in tools/venv: a wheel at hand where the base image's pip is told of one, else the build that TORCH names.
RUN python3 -m venv /opt/pdtransfer \
    && cd /opt/pdtransfer/bin \
    && torch="torch>=2.9,<3" \
    && (./pip install --no-cache-dir --no-index --no-deps "$torch" \
        || (./pip install --no-cache-dir uv \
            && ./uv pip install --no-cache --python ./python --torch-backend=${TORCH} "$torch" \
            && ./pip uninstall --yes uv))
WORKDIR /src
COPY pyproject.toml README.md ./
COPY kernels kernels
COPY proto proto
COPY pdtransfer pdtransfer
RUN /opt/pdtransfer/bin/pip install --no-cache-dir .
# The native copy is compiled here, for any CPU of this architecture, so that the image needs no compiler.
RUN PDTRANSFER_CACHE=/var/cache/pdtransfer /opt/pdtransfer/bin/python -c \
    "import sys; from pdtransfer.kernels import load; native = load(); print(native.text); sys.exit(not native.used)"

FROM ${BASE}
RUN command -v python3 || (apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*)
RUN useradd --uid 10001 --create-home pdtransfer \
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
