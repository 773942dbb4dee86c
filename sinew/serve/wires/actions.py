"""The routes of the protocol ``http``: ``/v1/actions``, ``/vqa``, ``/subtask``, ``/act`` and ``/v1/metadata``, for
the first policy or for a policy by its name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from sinew.core import Observation, PolicySpec, RequestError
from sinew.serve.access import POLICIES
from sinew.serve.request import Request
from sinew.serve.service import Service
from sinew.serve.transport import admin
from sinew.serve.transport.connections import connection_of
from sinew.serve.transport.routes import Guard, read_body
from sinew.serve.wires import http


class Actions:
    def __init__(self, service: Service):
        self._service = service

    def add(self, guarded: Guard, router: web.UrlDispatcher) -> None:
        named = f"{POLICIES}/{{policy}}"
        for path in ("/v1/metadata", f"{named}/metadata"):
            router.add_get(path, guarded(self.metadata))
        for path in ("/v1/actions", f"{named}/actions"):
            router.add_post(path, guarded(self.actions))
        for name, handler in (("vqa", self.vqa), ("subtask", self.subtask)):
            for path in (f"/{name}", f"{named}/{name}"):
                router.add_post(path, guarded(handler))
        for path in ("/act", f"{named}/act"):
            router.add_post(path, guarded(self.act))

    async def metadata(self, request: web.Request) -> web.Response:
        """Answer with the description of the server and the policy, and the server's health."""
        about = self._service.about(request.match_info.get("policy", ""))
        return web.json_response(about | {"health": self._service.health()})

    async def actions(self, request: web.Request) -> web.Response:
        """Answer an observation with a chunk, in the format of the request (JSON or msgpack)."""
        return await self._answered(request, lambda seen: seen)

    async def vqa(self, request: web.Request) -> web.Response:
        """Answer a question about an observation with a text."""
        return await self._answered(request, http.with_question)

    async def subtask(self, request: web.Request) -> web.Response:
        """Answer an observation with the subtask that the policy generates as text."""
        return await self._answered(request, http.subtask)

    async def _answered(
        self, request: web.Request, ask: Callable[[Observation], Observation]
    ) -> web.Response:
        """Answer an observation. ``ask`` adds the request of the route to the observation, for example a subtask."""
        kind = http.MSGPACK if request.content_type == http.MSGPACK else http.JSON
        with self._service.reading("http", request.remote or ""):
            arrived, body = await read_body(request)
            message = http.read(body, kind)
            # Free the memory of the body, because the message contains its parts.
            del body
            policy = request.match_info.get("policy", message.policy)
            if message.policy not in ("", policy):
                raise RequestError(
                    f"policy: expected {policy} as in the address, got {message.policy[:80]!r}"
                )
            spec = self._service.policies.get(policy).spec
        client = request.remote or ""
        outcomes = await self._service.outcomes(
            message,
            lambda each, budget: ask(http.observation(each, spec, budget)),
            wire="http",
            client=client,
            owner=client,
            arrived=arrived,
            connection=connection_of(request),
            policy=policy,
        )
        answer = http.answer(message, outcomes, 1e3 * (time.perf_counter() - arrived), kind)
        return web.Response(body=answer, content_type=kind)

    async def act(self, request: web.Request) -> web.Response:
        """Answer a request of OpenVLA's clients."""
        policy = request.match_info.get("policy", "")
        with self._service.reading("http", request.remote or ""):
            arrived, body = await read_body(request)
            act = http.read_act(body)
            del body
            spec = self._service.policies.get(policy).spec
        inference = Request(
            "http",
            partial(http.act_observation, act, spec),
            request.remote or "",
            arrived=arrived,
            connection=connection_of(request),
            policy=policy,
        )
        chunk = await self._service.infer(inference)
        return web.Response(body=http.act_answer(chunk, act), content_type=http.JSON)


class HttpRoutes:
    """The routes of the protocol ``http``, and the routes that change policies."""

    name = http.NAME

    def add(self, service: Service, guarded: Guard, router: web.UrlDispatcher) -> None:
        Actions(service).add(guarded, router)
        admin.add(service, guarded, router)

    def guide(self, spec: PolicySpec, address: str) -> Sequence[str]:
        return http.guide(spec, address)


ROUTES = HttpRoutes()
