"""The routes below ``/v1/policies``, which list, load, replace and unload policies by name.

Changes are accepted only from this machine, and only with the server's key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web
from sinew_client.untrusted import parse_json

from sinew.core import BundleError, ConvertError, RequestError
from sinew.serve.access import POLICIES, UnauthorizedError, is_loopback
from sinew.serve.service import Service
from sinew.serve.transport.routes import Guard, read_body

MAX_SOURCE = 4096  # longest source, characters: the longest path on Linux
MAX_BODY = 1 << 16  # largest request, bytes


def add(service: Service, guarded: Guard, router: web.UrlDispatcher) -> None:
    async def listed(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"policies": service.policies.describe()})

    async def load(request: web.Request) -> web.StreamResponse:
        _admit(request)
        _arrived, body = await read_body(request)
        if len(body) > MAX_BODY:
            raise RequestError(f"body: expected at most {MAX_BODY} bytes, got {len(body)}")
        try:
            body_fields = parse_json(body)
            source, accept = body_fields["source"], body_fields.get("accept", [])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RequestError('body: expected a JSON object such as {"source": "BUNDLE"}') from None
        if not isinstance(accept, list) or not all(isinstance(each, str) for each in accept):
            raise RequestError('accept: expected a list of names, such as ["units"]')
        if not isinstance(source, str) or not source or "\0" in source:
            raise RequestError(f"source: expected text, got {type(source).__name__}")
        if len(source) > MAX_SOURCE:
            raise RequestError(f"source: expected at most {MAX_SOURCE} characters, got {len(source)}")
        return await run(service.swapper.load, request.match_info["policy"], source, accept)

    async def unload(request: web.Request) -> web.StreamResponse:
        _admit(request)
        return await run(service.swapper.unload, request.match_info["policy"])

    def _admit(request: web.Request) -> None:
        if not is_loopback(request.remote) or not service.wants_key:
            raise UnauthorizedError(
                f"{request.method} {POLICIES} is accepted only from this machine, and only if the server has a key;"
                " send the request on the server's machine, and start the server with --api-key-file"
            )
        if service.swapper is None:
            raise RequestError(
                "this server cannot change its policies; restart it with the policies that you need"
            )

    async def run(change: Callable[..., dict[str, Any]], *given: Any) -> web.StreamResponse:
        try:
            report = await asyncio.get_running_loop().run_in_executor(None, change, *given)
        except (
            BundleError,
            ConvertError,
        ) as error:
            # The error is about the requested policy, not about the policy in use.
            raise RequestError(str(error)) from None
        except OSError as error:  # the path is too long, or the disk is full
            raise RequestError(f"source: {error.strerror or error}") from None
        return web.json_response(report)

    router.add_get(POLICIES, guarded(listed))
    router.add_put(f"{POLICIES}/{{policy}}", guarded(load))
    router.add_delete(f"{POLICIES}/{{policy}}", guarded(unload))
