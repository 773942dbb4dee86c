"""A server on this machine with the routes of the Hugging Face hub that `huggingface_hub` uses to fetch and commit
files.

Large files are sent with git LFS. `huggingface_hub` uses git LFS if HF_HUB_DISABLE_XET is set.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """A hub with repositories at an address of this machine.

    A test may change the attributes while the hub runs.

    Attributes:
        asked: Paths of all requests.
        home: Folder in which new repositories are created.
        token: Token that writing clients must send.
        sizes: Wrong sizes to report for files, by name.
        bodies: Bytes to send instead of the content of a file, by name.
        stall: True to send the first half of a file and then wait for ``go``.
    """

    def __init__(self, repositories: dict[str, Path], home: Path | None = None, token: str = "a-token"):
        self.repositories, self.asked = repositories, list[str]()
        self.home, self.token, self.objects = home, token, dict[str, bytes]()
        self.commits = list[dict[str, Any]]()
        self.sizes, self.bodies, self.names = dict[str, int](), dict[str, bytes](), list[str]()
        self.stall, self.go = threading.Event(), threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_POST(self) -> None:
                hub.take(self)

            def do_PUT(self) -> None:
                hub.take(self)

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
                siblings = [self.described(file, file.relative_to(folder).as_posix()) for file in files]
                siblings += [{"rfilename": name} for name in self.names]
                info = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
                return self.send(request, 200, json.dumps(info).encode(), body)
            if path.startswith(f"/{name}/resolve/"):
                file = folder / path.removeprefix(f"/{name}/resolve/").partition("/")[2]
                if file.is_file():
                    return self.send(request, 200, self.bodies.get(file.name, file.read_bytes()), body)
                return self.send(request, 404, b"", body, "EntryNotFound")
        return self.send(request, 404, b'{"error": "Repository not found"}', body, "RepoNotFound")

    def described(self, file: Path, name: str) -> dict[str, Any]:
        """Return the description of a file, for a large file as in git LFS."""
        data = file.read_bytes()
        size = self.sizes.get(file.name, len(data))
        lfs = {"sha256": hashlib.sha256(data).hexdigest(), "size": size, "pointerSize": 134}
        found = {"rfilename": name, "size": size, "blobId": hashlib.sha1(data).hexdigest()}
        return found | ({"lfs": lfs} if file.suffix in (".gguf", ".safetensors") else {})

    def take(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request that writes."""
        path = unquote(urlsplit(request.path).path)
        self.asked.append(path)
        data = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        if path.startswith("/objects/"):  # a signed address needs no token
            self.objects[path.removeprefix("/objects/")] = data
            return self.send(request, 200, b"", True)
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return self.send(request, 401, b'{"error": "Invalid username or password."}', True)
        if path == "/api/repos/create":
            asked = json.loads(data)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.repositories:
                return self.send(request, 409, b'{"error": "You already created this model repo"}', True)
            self.repositories[name] = (self.home or Path()) / name
            self.repositories[name].mkdir(parents=True)
            return self.send(request, 200, json.dumps({"url": f"{self.url}/{name}"}).encode(), True)
        if path == "/api/validate-yaml":
            return self.send(request, 200, b'{"errors": [], "warnings": []}', True)
        if path.endswith("/preupload/main"):
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".gguf") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(data)["files"]
            ]
            return self.send(request, 200, json.dumps({"files": modes}).encode(), True)
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.url}/objects/{each['oid']}"}}}
                for each in json.loads(data)["objects"]
            ]
            return self.send(request, 200, json.dumps({"objects": objects}).encode(), True)
        if path.endswith("/commit/main"):
            return self.commit(request, path.removeprefix("/api/models/").removesuffix("/commit/main"), data)
        return self.send(request, 404, b'{"error": "no such route"}', True)

    def commit(self, request: BaseHTTPRequestHandler, name: str, data: bytes) -> None:
        """Write the files of a commit, which arrive as one JSON object per line."""
        for line in map(json.loads, data.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value)
            elif line["key"] == "file":
                content = base64.b64decode(value["content"])
                (self.repositories[name] / value["path"]).write_bytes(content)
            elif line["key"] == "lfsFile":
                content = self.objects[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                (self.repositories[name] / value["path"]).write_bytes(content)
        answer = {"commitUrl": f"{self.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
        self.send(request, 200, json.dumps(answer).encode(), True)

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
        if not body:
            return
        if len(data) > 1 << 14 and self.stall.is_set():
            request.wfile.write(data[: len(data) // 2])
            self.stall.clear()
            self.go.wait()
            return
        request.wfile.write(data)


@contextmanager
def fake_hub(repositories: dict[str, Path], home: Path | None = None) -> Iterator[FakeHub]:
    """Serve ``repositories`` until the end of the block, and the repositories that clients create in ``home``."""
    hub = FakeHub(repositories, home)
    thread = threading.Thread(target=hub.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()
