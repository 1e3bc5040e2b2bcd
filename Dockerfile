# Images of the service: `cpu` (the default), `torch` (torch's CPU build) and `cuda`. `make image` builds one of them.
ARG BASE_IMAGE=python:3.13-slim

# Two environments: /build has pip and the build tools, /opt/attention is copied into the image.
FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_ONLY_BINARY=:all: PIP_QUIET=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
RUN python -m venv /build && python -m venv --without-pip /opt/attention
COPY requirements/build.txt requirements/core.txt requirements/
RUN /build/bin/pip install --require-hashes -r requirements/build.txt \
    && /build/bin/pip --python /opt/attention/bin/python install --require-hashes -r requirements/core.txt
# GRPC=yes adds gRPC, which makes the environment a quarter larger.
ARG GRPC=
COPY requirements/grpc.txt requirements/
RUN test -z "${GRPC}" || /build/bin/pip --python /opt/attention/bin/python install --require-hashes -r requirements/grpc.txt
# OTEL=yes adds OpenTelemetry, for traces.
ARG OTEL=
COPY requirements/otel.txt requirements/
RUN test -z "${OTEL}" || /build/bin/pip --python /opt/attention/bin/python install --require-hashes -r requirements/otel.txt

# Installs the package, and deletes files that only compilers, type checkers and tests need. Bytecode is compiled here,
# because the file system is read-only later. It is not checked against the time of its source, which copying may change.
FROM build AS build-package
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY service service
RUN /build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheel . \
    && /build/bin/pip --python /opt/attention/bin/python install --no-deps /wheel/*.whl \
    && find /opt/attention/lib -depth -regex '.*/tests\|.*\.\(h\|cpp\|pxd\|pyi\|pyx\)' -exec rm -r {} + \
    && python -m compileall -q --invalidation-mode unchecked-hash /opt/attention/lib

# torch has a directory of its own, so that changes of the service do not rebuild its layer. Some of its files are for
# other versions of Python and do not compile; they are never imported.
FROM build AS build-torch
# Arguments of pip that name the build of torch and its index, as in `make install-torch`.
ARG TORCH=
RUN /build/bin/pip install --target /opt/torch array-api-compat ${TORCH:?names a build of torch} \
    && { python -m compileall -qq --invalidation-mode unchecked-hash /opt/torch || true; }

FROM build AS build-cuda
COPY requirements/cuda.txt requirements/
RUN /build/bin/pip install --target /opt/torch --require-hashes -r requirements/cuda.txt \
    && { python -m compileall -qq --invalidation-mode unchecked-hash /opt/torch || true; }

FROM ${BASE_IMAGE} AS service
# The file system may be read-only, except /tmp.
RUN useradd --no-log-init --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin attention
COPY --from=build-package /opt/attention /opt/attention
ENV PATH=/opt/attention/bin:$PATH ATTENTION_HOST=0.0.0.0
USER 10001:10001
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

# Only the driver comes from the host, whose container runtime reads the NVIDIA_ variables.
FROM service AS cuda
COPY --from=build-cuda /opt/torch /opt/torch
ENV PYTHONPATH=/opt/torch NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    ATTENTION_BACKEND=auto

FROM service AS cpu
