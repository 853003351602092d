# syntax=docker/dockerfile:1
# Image for CPUs, with the demo checkpoint. From the repository's root:
#   docker build -f deployments/images/cpu.Dockerfile -t flare-ray:0.1.0-cpu .
# On Linux, pip's default index holds a CUDA build of torch; name an index of CPU builds:
#   --build-arg TORCH_PIP_ARGS="--index-url <index of CPU builds>"
# Try it: docker run --rm --network host --shm-size 1g flare-ray:0.1.0-cpu
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
ARG TORCH_PIP_ARGS=""
COPY deployments/images/install.sh deployments/images/
RUN deployments/images/install.sh /opt/venv torch
COPY deployments/images/requirements.txt deployments/images/
RUN deployments/images/install.sh /opt/venv packages
COPY pyproject.toml README.md LICENSE ./
COPY flare_ray flare_ray
RUN deployments/images/install.sh /opt/venv project

FROM ${PYTHON_IMAGE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# wget: the probes that KubeRay puts into the pods call it. The links: a login shell resets PATH.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 ray \
    && useradd --no-log-init --uid 1000 --gid ray --create-home ray \
    && ln -s /opt/venv/bin/ray /opt/venv/bin/serve /opt/venv/bin/flare-ray /usr/local/bin/
COPY --from=build /opt/venv /opt/venv
COPY deployments /opt/flare-ray/deployments
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0
WORKDIR /opt/flare-ray
USER 1000:1000
EXPOSE 8000
CMD ["flare-ray", "serve", "deployments/glm-demo.yaml"]
