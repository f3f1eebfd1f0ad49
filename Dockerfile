# pdtransfer in a container: CPU by default, no user but its own. deploy/README.md says what to give it, and has the fleet.
#   docker build -t pdtransfer .
#   docker build -t pdtransfer --build-arg BASE=<an image with CUDA, of Debian or Ubuntu> --build-arg TORCH=cu130 .
#   docker run --rm --init pdtransfer demo
# Wheels in build/wheels (tools/wheels puts them there) are taken before any index is asked.
ARG BASE=python:3.12-slim

FROM ${BASE} AS runtime
# Python where the base has none, and what Mooncake's wheel is linked to.
RUN libraries="libibverbs1 ibverbs-providers librdmacm1 libnuma1 libcurl4" \
    && python=$(command -v python3 >/dev/null || echo python3) \
    && if [ -n "$python" ] || ! dpkg -s $libraries >/dev/null 2>&1; then \
        apt-get update && apt-get install -y --no-install-recommends $python $libraries \
        && apt-get clean && rm -rf /var/lib/apt/lists/*; \
    fi

FROM runtime AS build
# Which build of torch: cpu, auto, or one of CUDA's as uv names them.
ARG TORCH=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_FIND_LINKS=/wheels
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
        $(python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv) \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml build/wheel[s] /wheels/
# As in tools/venv: a wheel at hand where there is one, else the build that TORCH names; then the rest, likewise.
RUN python3 -m venv /opt/pdtransfer \
    && cd /opt/pdtransfer/bin \
    && torch="torch>=2.9,<3" \
    && (./pip install --no-index --no-deps "$torch" \
        || (./pip install uv \
            && ./uv pip install --no-cache --python ./python --torch-backend=${TORCH} "$torch" \
            && ./pip uninstall --yes uv)) \
    && ./python -c "import tomllib; project = tomllib.load(open('/wheels/pyproject.toml', 'rb'))['project']; \
        extras = project['optional-dependencies']; \
        print(*project['dependencies'], *extras['daemons'], *extras['mooncake'], *(each for each in extras['otel'] + extras['dns'] if 'pdtransfer' not in each), sep='\n')" >/wheels/needed \
    && (./pip install --no-index "$torch" -r /wheels/needed || ./pip install "$torch" -r /wheels/needed) \
    && (./pip install --no-index --target /builder hatchling || ./pip install --target /builder hatchling) \
    # What only builds and tests of others need.
    && cd /opt/pdtransfer/lib/python3*/site-packages \
    && rm -rf torch/include torch/test torch/share torch/bin/test_* torch/bin/*Test torch/bin/protoc* \
        mooncake/transfer_engine_bench \
    && find sympy networkx numpy -type d -name tests -prune -exec rm -rf {} +
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY proto proto
COPY pdtransfer pdtransfer
RUN PYTHONPATH=/builder /opt/pdtransfer/bin/pip install --no-index --no-deps --no-build-isolation . \
    && /opt/pdtransfer/bin/pip uninstall --yes pip setuptools
# The native copy is compiled here, for any CPU of this architecture, so that the image needs no compiler.
RUN cd / && PDTRANSFER_CACHE=/var/cache/pdtransfer /opt/pdtransfer/bin/python -c \
    "import sys; from pdtransfer.kernels import load; native = load(); print(native.text); sys.exit(not native.used)"
COPY deploy/healthy deploy/fleet-keys /opt/pdtransfer/bin/

FROM runtime
RUN useradd --uid 10001 --create-home pdtransfer \
    && install -d -o pdtransfer -g pdtransfer -m 0700 /run/pdtransfer
COPY --from=build --chown=pdtransfer:pdtransfer /var/cache/pdtransfer /var/cache/pdtransfer
COPY --from=build /opt/pdtransfer /opt/pdtransfer
ENV PATH=/opt/pdtransfer/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PDTRANSFER_CACHE=/var/cache/pdtransfer \
    PDTRANSFER_SOCKET_DIRECTORY=/run/pdtransfer
# Peers' control, then /metrics of prefill, of decode, completions.
EXPOSE 7101 7102 7201 7202 8000
HEALTHCHECK --interval=5s --timeout=3s --retries=3 --start-period=60s CMD ["healthy"]
USER pdtransfer
WORKDIR /home/pdtransfer
ENTRYPOINT ["pdtransfer"]
CMD ["--help"]
