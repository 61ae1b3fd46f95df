# The server on a CPU. From the root of a clone:
#   docker build -f deploy/docker/cpu.Dockerfile -t mars-export:cpu .
#   docker run --rm -p 8000:8000 --read-only --tmpfs /cache:mode=1777 \
#     -v "$PWD/mars.bundle:/bundles/mars.bundle:ro" mars-export:cpu
# Linted, and never built where it was written (docs/scale.md).
FROM python:3.12-slim-bookworm AS build
ARG EXTRAS=serve,grammar
# For the kernels.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE MANIFEST.in __init__.py cli.py py.typed ./
COPY runtime runtime
COPY exporter exporter
COPY calibration calibration
COPY kernels kernels
RUN python -m venv /opt/mars && /opt/mars/bin/pip install --no-cache-dir ".[${EXTRAS}]" ./kernels

FROM python:3.12-slim-bookworm
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin mars \
    && install -d -o mars -g mars /cache /bundles
COPY --from=build /opt/mars /opt/mars
# /cache keeps which files were hashed, so that a restart does not hash them again.
ENV PATH=/opt/mars/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 XDG_CACHE_HOME=/cache
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["mars-export", "serve"]
CMD ["/bundles/mars.bundle", "--host", "0.0.0.0", "--port", "8000", "--log-format", "json"]
