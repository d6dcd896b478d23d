# Two images: `probes` (probe hosts, producer, topics; no torch) and `engine` (the same, and vLLM).
#   docker build --target probes -t undercurrent:probes .
#   docker build --target engine --build-arg ENGINE=gpu -t undercurrent:engine .
FROM python:3.11-slim AS probes
WORKDIR /opt/undercurrent
RUN useradd --create-home undercurrent
COPY requirements requirements
COPY pyproject.toml README.md LICENSE ./
COPY schemas schemas
COPY undercurrent undercurrent
COPY engine_worker engine_worker
COPY probe_consumers probe_consumers
COPY producer producer
# The lock is the list of versions here, not of packages: this image takes only what the project itself needs.
RUN pip install --no-cache-dir --constraint requirements/cpu.lock .
USER undercurrent
ENTRYPOINT ["undercurrent"]

FROM probes AS engine
USER root
# vLLM compiles small kernels and helpers when it starts.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libgomp1 libnuma1 && rm -rf /var/lib/apt/lists/*
# cpu or gpu; torch's CPU builds are on PyTorch's own index.
ARG ENGINE=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN if [ "$ENGINE" = cpu ]; then \
        pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX" --requirement requirements/torch-cpu.lock; \
    fi && pip install --no-cache-dir --no-deps --requirement "requirements/$ENGINE.lock"
USER undercurrent
