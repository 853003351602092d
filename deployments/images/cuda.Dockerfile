# syntax=docker/dockerfile:1
# Image for NVIDIA GPUs. From the repository's root:
#   docker build -f deployments/images/cuda.Dockerfile -t flare-ray:0.1.0-cuda .
# The CUDA libraries come with torch's own packages, in the versions it was built with; the host gives the driver
# (NVIDIA's container toolkit). Weights are not in the image.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /src
COPY deployments/images/install.sh deployments/images/requirements-cuda.txt deployments/images/
RUN deployments/images/install.sh /opt/venv cuda
COPY deployments/images/requirements.txt deployments/images/
RUN deployments/images/install.sh /opt/venv packages
COPY pyproject.toml README.md LICENSE ./
COPY flare_ray flare_ray
RUN deployments/images/install.sh /opt/venv project
COPY deployments/images/kernels.list deployments/images/
COPY deployments/images/geometries deployments/images/geometries
COPY deployments/deepseek.yaml deployments/glm.yaml deployments/qwen.yaml deployments/
RUN deployments/images/install.sh /opt/venv kernels

FROM ${PYTHON_IMAGE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# wget: the probes that KubeRay puts into the pods call it. gcc and libc's headers: Triton compiles a launcher for
# each kernel. The links: a login shell resets PATH.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends wget gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 ray \
    && useradd --no-log-init --uid 1000 --gid ray --create-home ray \
    && ln -s /opt/venv/bin/ray /opt/venv/bin/serve /opt/venv/bin/flare-ray /usr/local/bin/
COPY --from=build /opt/venv /opt/venv
# Where Triton looks, and may add what other settings need. A prepared core brings its own.
COPY --from=build --chown=1000:1000 /opt/kernels /home/ray/.triton/cache
COPY deployments/deepseek.yaml deployments/glm.yaml deployments/qwen.yaml /opt/flare-ray/deployments/
ENV HOME=/home/ray \
    PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/flare-ray
USER 1000:1000
EXPOSE 8000
CMD ["flare-ray", "serve", "deployments/glm.yaml"]
