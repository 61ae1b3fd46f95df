# The server on an NVIDIA GPU: onnxruntime-gpu, or TensorRT with --build-arg EXTRAS=trt,serve,grammar (the
# bundle then needs an engine that was built for this GPU: docs/tensorrt.md). From the root of a clone:
#   docker build -f deploy/docker/cuda.Dockerfile -t mars-export:cuda .
#   docker run --rm --gpus 1 -p 8000:8000 -v "$PWD/mars.bundle:/bundles/mars.bundle:ro" mars-export:cuda
# Linted, and never built where it was written (docs/scale.md). CUDA must be the one that the wheel of
# onnxruntime-gpu was built for.
ARG CUDA=12.8.1-cudnn-runtime-ubuntu24.04
# hadolint ignore=DL3006
FROM nvidia/cuda:${CUDA} AS build
ARG EXTRAS=gpu,serve,grammar
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE MANIFEST.in __init__.py cli.py py.typed ./
COPY runtime runtime
COPY exporter exporter
COPY calibration calibration
COPY kernels kernels
# The files of onnxruntime and onnxruntime-gpu have the same names: those of the last one stay.
RUN python3 -m venv /opt/mars && /opt/mars/bin/pip install --no-cache-dir ".[${EXTRAS}]" ./kernels \
    && case ",${EXTRAS}," in *,gpu,*) /opt/mars/bin/pip install --no-cache-dir --force-reinstall --no-deps onnxruntime-gpu ;; esac

# hadolint ignore=DL3006
FROM nvidia/cuda:${CUDA}
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin mars \
    && install -d -o mars -g mars /cache /bundles
COPY --from=build /opt/mars /opt/mars
ENV PATH=/opt/mars/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 XDG_CACHE_HOME=/cache
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["mars-export", "serve"]
CMD ["/bundles/mars.bundle", "--host", "0.0.0.0", "--port", "8000", "--device", "cuda", "--log-format", "json"]
