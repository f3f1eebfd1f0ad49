"""What every process has in its metrics, whatever its role: which build it is, what it uses, what its HTTP answered."""

from __future__ import annotations

import platform

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, Counter, Info, ProcessCollector

from ... import __version__

ELSEWHERE = "other"  # the path of a request for what is not there: clients choose it, so it is not a label
LEFT = 499  # the status of an answer that its client did not wait for


def process_registry(*, role: str, node: str) -> CollectorRegistry:
    """A registry with the process's own figures, and its build."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    build = Info("pdtransfer_build", "What runs here, always 1", registry=registry)
    build.info({"version": __version__, "python": platform.python_version(), "role": role, "node": node})
    return registry


def http_counter(registry: CollectorRegistry) -> Middleware:
    """A middleware that counts all answers by path and status, those to requests that no route takes included."""
    answers = Counter("pdtransfer_http_responses", "HTTP answers", ["path", "status"], registry=registry)

    @web.middleware
    async def through(request: web.Request, handler: Handler) -> web.StreamResponse:
        status = LEFT
        try:
            response = await handler(request)
            status = response.status
            return response
        except web.HTTPException as refused:
            status = refused.status
            raise
        except Exception:
            status = 500
            raise
        finally:
            resource = request.match_info.route.resource
            answers.labels(ELSEWHERE if resource is None else resource.canonical, str(status)).inc()

    return through
