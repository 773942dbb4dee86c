"""``POST /v1/policy``: exchange the policy of a running server. From this machine alone, and with its key."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Awaitable, Callable

from aiohttp import web

from sinew.core import RequestError
from sinew.serve.service import Service, UnauthorizedError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def add(service: Service, guarded: Callable[[Handler], Handler], router: web.UrlDispatcher) -> None:
    """Add the route. guarded: puts a handler behind the server's key and answers errors."""

    async def swap(request: web.Request) -> web.StreamResponse:
        if not _is_loopback(request.remote) or not service.wants_key:
            raise UnauthorizedError(
                "POST /v1/policy is for this machine alone, and wants a server with a key"
            )
        if service.swapper is None:
            raise RequestError("this server does not exchange its policy")
        try:
            source = json.loads(await request.read())["source"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RequestError('expected {"source": "what sinew serve takes"}') from None
        if not isinstance(source, str) or not source or "\0" in source:
            raise RequestError(f"source: expected text, got {type(source).__name__}")
        took = await asyncio.get_running_loop().run_in_executor(None, service.swapper.swap, source)
        return web.json_response(took)

    router.add_post("/v1/policy", guarded(swap))


def _is_loopback(address: str | None) -> bool:
    try:
        return address is not None and ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
