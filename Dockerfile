# pdtransfer in containers, for a user of its own. deploy/README.md says what to give them, and has the fleet.
#   docker build --target router -t pdtransfer-router .     the router: no torch
#   docker build --target worker -t pdtransfer .            prefill, decode and every other command: no torch
#   docker build --target worker-torch -t pdtransfer-torch .   the same with torch for CPUs
#   docker build --target cuda -t pdtransfer-cuda .         the same on a base with CUDA
#   docker run --rm --init pdtransfer demo
# A builder without BuildKit makes every stage above the one that is named, so worker stands above what installs torch.
# deploy/locks has the version and the hashes of each package. Wheels in build/wheels (tools/wheels puts them there) are taken
# before any index is asked.
ARG BASE=debian:12-slim
ARG CUDA_BASE=nvidia/cuda:13.0.2-base-ubuntu24.04

FROM ${BASE} AS base
# Python where the base has none.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates $(command -v python3 >/dev/null || echo python3) \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home pdtransfer

FROM base AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends binutils gcc libc6-dev \
        $(python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv) \
    && rm -rf /var/lib/apt/lists/*
COPY deploy/image/install /build/
COPY deploy/locks /locks/
# Builders have an environment of their own; its pip installs into the image's.
RUN python3 -m venv /builder && python3 -m venv --without-pip /opt/pdtransfer
COPY pyproject.toml build/wheel[s] /wheels/
RUN /build/install /builder build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY proto proto
COPY pdtransfer pdtransfer
RUN /builder/bin/hatchling build -t wheel -d /dist
COPY deploy/healthy deploy/fleet-keys /opt/pdtransfer/bin/
WORKDIR /opt/pdtransfer

FROM build AS router-build
RUN /build/install /opt/pdtransfer router && /build/install /opt/pdtransfer /dist/*.whl
COPY deploy/image /build/
RUN /build/finish pdtransfer.serve.router.backends.daemons.backend

FROM scratch AS router
COPY --from=router-build /image /
ENV PATH=/opt/pdtransfer/bin:/usr/bin:/bin PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --retries=3 --start-period=60s CMD ["healthy"]
USER pdtransfer
WORKDIR /home/pdtransfer
ENTRYPOINT ["pdtransfer"]
CMD ["--help"]

FROM build AS worker-packages
# What Mooncake's wheel is linked to.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers librdmacm1 libnuma1 libcurl4 \
    && rm -rf /var/lib/apt/lists/*
RUN /build/install /opt/pdtransfer worker && /build/install /opt/pdtransfer /dist/*.whl
# The native copy is compiled here, for any CPU of this architecture, so that the image needs no compiler.
RUN PDTRANSFER_CACHE=/var/cache/pdtransfer bin/python -B -c \
        "import sys; from pdtransfer.kernels import load; native = load(); print(native.text); sys.exit(not native.used)" \
    && chown -R pdtransfer:pdtransfer /var/cache/pdtransfer

FROM worker-packages AS worker-build
COPY deploy/image /build/
RUN /build/finish pdtransfer.serve.worker.daemon,pdtransfer.serve.engines.stamp.factory,mooncake.engine \
        $(dpkg -L ibverbs-providers | grep -E '[.](so|driver)$') $(find /usr/lib -name 'librdmacm.so.1')

FROM scratch AS worker
COPY --from=worker-build /image /
ENV PATH=/opt/pdtransfer/bin:/usr/bin:/bin \
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

FROM worker-packages AS worker-torch-build
RUN /build/install /opt/pdtransfer torch-cpu --index-url https://download.pytorch.org/whl/cpu
COPY deploy/image /build/
RUN /build/finish pdtransfer.serve.worker.daemon,torch,pdtransfer.serve.engines.stamp.factory,mooncake.engine \
        $(dpkg -L ibverbs-providers | grep -E '[.](so|driver)$') $(find /usr/lib -name 'librdmacm.so.1')

FROM scratch AS worker-torch
COPY --from=worker-torch-build /image /
ENV PATH=/opt/pdtransfer/bin:/usr/bin:/bin \
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

FROM ${CUDA_BASE} AS cuda-base
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates $(command -v python3 >/dev/null || echo python3) \
        libibverbs1 ibverbs-providers librdmacm1 libnuma1 libcurl4 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home pdtransfer \
    && install -d -o pdtransfer -g pdtransfer -m 0700 /run/pdtransfer

FROM cuda-base AS cuda-build
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
        $(python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv) \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /build /build
COPY --from=build /locks /locks
COPY --from=build /wheels /wheels
COPY --from=build /dist /dist
RUN python3 -m venv /builder && python3 -m venv --without-pip /opt/pdtransfer && /build/install /builder build
RUN /build/install /opt/pdtransfer cuda && /build/install /opt/pdtransfer /dist/*.whl
COPY deploy/healthy deploy/fleet-keys /opt/pdtransfer/bin/
WORKDIR /opt/pdtransfer
RUN PDTRANSFER_CACHE=/var/cache/pdtransfer bin/python -c \
        "import sys; from pdtransfer.kernels import load; native = load(); print(native.text); sys.exit(not native.used)" \
    && /builder/bin/cyclonedx-py environment --output-reproducible --output-format JSON --output-file /sbom.json bin/python \
    && { bin/python -m compileall -q lib || true; }

FROM cuda-base AS cuda
COPY --from=cuda-build --chown=pdtransfer:pdtransfer /var/cache/pdtransfer /var/cache/pdtransfer
COPY --from=cuda-build /opt/pdtransfer /opt/pdtransfer
COPY --from=cuda-build /sbom.json /build/
COPY deploy/image/sbom.py /build/
RUN python3 /build/sbom.py /build/sbom.json && rm -r /build
ENV PATH=/opt/pdtransfer/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PDTRANSFER_CACHE=/var/cache/pdtransfer \
    PDTRANSFER_SOCKET_DIRECTORY=/run/pdtransfer \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 7101 7102 7201 7202 8000
HEALTHCHECK --interval=5s --timeout=3s --retries=3 --start-period=60s CMD ["healthy"]
USER pdtransfer
WORKDIR /home/pdtransfer
ENTRYPOINT ["pdtransfer"]
CMD ["--help"]

# Without a target, the worker.
FROM worker
