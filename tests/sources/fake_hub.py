"""A hub on loopback: the routes of the Hugging Face hub that `huggingface_hub` asks to fetch a repository's files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Repositories (name -> folder) behind an address; ``asked`` has the paths of all requests."""

    def __init__(self, repositories: dict[str, Path]):
        self.repositories, self.asked = repositories, list[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        self.asked.append(path)
        for name, folder in self.repositories.items():
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            if path.startswith(f"/api/models/{name}/tree/"):
                tree = [
                    {
                        "type": "file",
                        "path": file.relative_to(folder).as_posix(),
                        "size": file.stat().st_size,
                        "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                    }
                    for file in files
                ]
                return self.send(request, 200, json.dumps(tree).encode(), body)
            if path == f"/api/models/{name}" or path.startswith(f"/api/models/{name}/revision/"):
                siblings = [{"rfilename": file.relative_to(folder).as_posix()} for file in files]
                info = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
                return self.send(request, 200, json.dumps(info).encode(), body)
            if path.startswith(f"/{name}/resolve/"):
                file = folder / path.removeprefix(f"/{name}/resolve/").partition("/")[2]
                if file.is_file():
                    return self.send(request, 200, file.read_bytes(), body)
                return self.send(request, 404, b"", body, "EntryNotFound")
        return self.send(request, 404, b'{"error": "Repository not found"}', body, "RepoNotFound")

    def send(
        self, request: BaseHTTPRequestHandler, code: int, data: bytes, body: bool, error: str = ""
    ) -> None:
        request.send_response(code)
        request.send_header("Content-Length", str(len(data)))
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        if error:
            request.send_header("X-Error-Code", error)
        request.end_headers()
        if body:
            request.wfile.write(data)


@contextmanager
def fake_hub(repositories: dict[str, Path]) -> Iterator[FakeHub]:
    """Serve ``repositories`` while inside."""
    hub = FakeHub(repositories)
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()
