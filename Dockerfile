# Images of the service: `cpu` (the default), `torch` (torch's CPU build) and `cuda`. `make image` builds one of them.
ARG BASE_IMAGE=python:3.13-slim

# Two environments: one to install with, and the one that ships, which has neither pip nor what builds.
FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_ONLY_BINARY=:all: PIP_QUIET=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
RUN python -m venv /build && python -m venv --without-pip /opt/attention
COPY requirements/build.txt requirements/core.txt requirements/
RUN /build/bin/pip install --require-hashes -r requirements/build.txt \
    && /build/bin/pip --python /opt/attention/bin/python install --require-hashes -r requirements/core.txt
# For gRPC, where it is asked for: a quarter more.
ARG GRPC=
COPY requirements/grpc.txt requirements/
RUN test -z "${GRPC}" || /build/bin/pip --python /opt/attention/bin/python install --require-hashes -r requirements/grpc.txt

# The package, and away with what only compilers, type checkers and testers read. Nobody can write bytecode later, so it
# is made here; unchecked, as no source will ever change, and so that no file's time needs to survive being copied.
FROM build AS build-package
COPY pyproject.toml README.md LICENSE ./
COPY service service
RUN /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheel . \
    && /build/bin/pip --python /opt/attention/bin/python install --no-deps /wheel/*.whl \
    && find /opt/attention/lib -depth -regex '.*/tests\|.*\.\(h\|cpp\|pxd\|pyi\|pyx\)' -exec rm -r {} + \
    && python -m compileall -q --invalidation-mode unchecked-hash /opt/attention/lib

# torch lies beside the environment: what is built for it does not depend on our own code, which changes more often.
# Some of its files are for other versions of Python and do not compile; nothing imports them.
FROM build AS build-torch
# As in `make install-torch`: what to install, with pip's flags that say where torch's CPU build is.
ARG TORCH=
RUN /build/bin/pip install --target /opt/torch array-api-compat ${TORCH:?names a build of torch} \
    && { python -m compileall -qq --invalidation-mode unchecked-hash /opt/torch || true; }

FROM build AS build-cuda
COPY requirements/cuda.txt requirements/
RUN /build/bin/pip install --target /opt/torch --require-hashes -r requirements/cuda.txt \
    && { python -m compileall -qq --invalidation-mode unchecked-hash /opt/torch || true; }

FROM ${BASE_IMAGE} AS service
# Layers and whatever else is to last go to /data; the rest of the file system may be read-only, but for /tmp.
RUN useradd --no-log-init --uid 10001 --user-group --home-dir /data --no-create-home --shell /usr/sbin/nologin attention \
    && install --directory --owner attention --group attention /data
COPY --from=build-package /opt/attention /opt/attention
ENV PATH=/opt/attention/bin:$PATH ATTENTION_HOST=0.0.0.0
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s CMD ["attention-service", "health"]
ENTRYPOINT ["attention-service"]
CMD ["serve"]
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Attention service" \
      org.opencontainers.image.description="Exact attention over HTTP: the output, the weights, and all intermediate results." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM service AS torch
COPY --from=build-torch /opt/torch /opt/torch
ENV PYTHONPATH=/opt/torch

# The driver and nothing else comes from the host, whose container runtime reads the variables of NVIDIA. FlexAttention
# is compiled where it runs, for the GPU that is there, by a compiler of C among others; what comes of it is kept.
FROM service AS cuda
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-cuda /opt/torch /opt/torch
ENV PYTHONPATH=/opt/torch NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    ATTENTION_BACKEND=auto TRITON_CACHE_DIR=/data/triton \
    TORCHINDUCTOR_CACHE_DIR=/data/inductor TORCHINDUCTOR_COMPILE_THREADS=1
USER 10001:10001

FROM service AS cpu
