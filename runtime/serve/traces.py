"""OpenTelemetry traces: a span for each request, sent by OTLP over HTTP as the variables OTEL_* say."""

from __future__ import annotations

from starlette.types import ASGIApp

from ..errors import MarsError


def traced(app: ASGIApp) -> ASGIApp:
    """`app` with a span for each request, except health checks and metrics. Raises MarsError without the
    extra `traces`.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MarsError(f"--traces needs {error.name}: pip install 'mars-export[traces]'") from error
    provider = TracerProvider()  # it sends the rest at the exit of the process
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    wrapped: ASGIApp = OpenTelemetryMiddleware(
        app, excluded_urls="health,metrics", tracer_provider=provider, exclude_spans=["receive", "send"]
    )
    return wrapped
