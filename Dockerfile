# CUDA 13.0 is what the pinned PyTorch is built for; its wheels bring their own libraries, so the smallest image will do.
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04
FROM ${BASE}

RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 specter \
    && mkdir /cache /app \
    && chown specter /cache /app
USER specter
WORKDIR /app

ENV PATH=/app/.venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

# The large, rarely changing layer comes first.
COPY constraints.txt ./
RUN python3 -m venv .venv && pip install --constraint constraints.txt torch

COPY pyproject.toml README.md LICENSE ./
COPY engine engine
COPY server server
RUN pip install --constraint constraints.txt '.[demo]'
COPY configs configs

ENV SPECTER_HOST=0.0.0.0 \
    SPECTER_CACHE=/cache
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["specter"]
CMD ["serve"]
