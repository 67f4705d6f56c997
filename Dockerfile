# tracefit in two stages: what is built is copied, what builds stays behind.
#
#   docker build -t tracefit:0.1.0 .
#
# BASE: any Debian-like image whose python3 is 3.11 or newer and has venv. PIP_ARGS: for a build without an index, e.g.
# "--no-index --find-links wheelhouse" with a directory of wheels in the context. EXTRAS: kv,fleet makes the -fleet image, for
# `tracefit fleet replay` on Ray and from object stores (deploy/fleet/ray):
#
#   docker build -t tracefit:0.1.0-fleet --build-arg EXTRAS=kv,fleet .
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG PIP_ARGS=""
ARG EXTRAS=kv
WORKDIR /src
COPY . .
# Everything that the locks name is fetched and checked against their hashes; of that, what tracefit needs is installed,
# and compiled packages lose their own tests (30 MB).
RUN python3 -m venv /opt/tracefit \
    && case "${EXTRAS}" in *fleet*) locks="-r requirements-fleet.lock" ;; *) locks="" ;; esac \
    && pip="/opt/tracefit/bin/python -m pip --no-cache-dir --disable-pip-version-check" \
    && $pip download --quiet --dest /wheels ${PIP_ARGS} --require-hashes -r requirements.lock ${locks} \
    && $pip install --no-index --find-links /wheels ".[${EXTRAS}]" \
    && $pip install --no-index --find-links /wheels --no-deps --target /opt/tracefit-vllm ./deploy/vllm-plugin \
    && $pip uninstall --quiet --yes setuptools pip \
    && find /opt/tracefit/lib -type d -name tests -prune -exec rm -rf {} + \
    && /opt/tracefit/bin/tracefit --version \
    && mkdir -p /out/var/lib/tracefit

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tracefit" \
      org.opencontainers.image.description="Learns latency coefficients of vLLM from its traces, online" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/tracefit /opt/tracefit
# The producer for an un-forked vLLM: an init container copies it to where vLLM finds it (components/producer-plugin).
COPY --from=build /opt/tracefit-vllm /opt/tracefit-vllm
COPY --from=build --chown=65532:65532 /out/var/lib/tracefit /var/lib/tracefit
# The user has no home of its own, and Ray keeps its token at home.
ENV PATH=/opt/tracefit/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    MALLOC_ARENA_MAX=1 \
    MALLOC_MMAP_THRESHOLD_=4194304 \
    MALLOC_TRIM_THRESHOLD_=33554432
# Snapshots go below the working directory unless configured otherwise; everything else may be read-only.
WORKDIR /var/lib/tracefit
USER 65532:65532
EXPOSE 4317 4318 9464
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/healthz', timeout=4)"]
ENTRYPOINT ["tracefit"]
CMD ["run"]
