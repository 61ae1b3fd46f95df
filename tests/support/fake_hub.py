"""A hub on this machine: as much of huggingface.co's HTTP interface as pushing and pulling needs.

Repositories are dicts of files, with a commit for each push. Files of LARGE bytes and more go by LFS.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 2000
TOKEN = "hf_fake"


@dataclass
class Repo:
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    private: bool = False

    def commit(self, files: dict[str, bytes]) -> str:
        name = hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest()
        self.commits.append((name, files))
        return name

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision in ("main", "HEAD"):
            return self.commits[-1]
        return next((c for c in self.commits if c[0] == revision), None)


class FakeHub:
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.unknown: list[str] = []
        self.lie: dict[str, bytes] = {}  # what is sent in place of a file
        self.url = ""

    def files(self, repo: str) -> dict[str, bytes]:
        return self.repos[repo].commits[-1][1]


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._route()

        do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

        def _route(self) -> None:
            path = unquote(urlsplit(self.path).path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.requests.append(f"{self.command} {path}")
            for pattern, method in ROUTES:
                if (found := re.fullmatch(pattern, f"{self.command} {path}")) is not None:
                    getattr(self, method)(body, *found.groups())
                    return
            hub.unknown.append(f"{self.command} {path}")
            self._send(404, {"error": "unknown route"})

        def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if "Content-Length" not in (headers or {}):
                self.send_header("Content-Length", str(len(data)))
            for name, text in (headers or {}).items():
                self.send_header(name, text)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def _may_write(self) -> bool:
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                return True
            self._send(401, {"error": "Invalid username or password."})
            return False

        def _repo(self, name: str) -> Repo | None:
            repo = hub.repos.get(name)
            if repo is None or (repo.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
                self._send(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
                return None
            return repo

        def create(self, body: bytes) -> None:
            if not self._may_write():
                return
            asked = json.loads(body)
            owner = asked.get("organization") or "me"
            name = f"{owner}/{asked['name']}"
            url = f"{hub.url}/{name}"
            if name in hub.repos:
                self._send(409, {"error": "You already created this model repo", "url": url})
                return
            hub.repos[name] = Repo(private=bool(asked.get("private")) or asked.get("visibility") == "private")
            hub.repos[name].commit({".gitattributes": b"*.onnx filter=lfs\n"})
            self._send(200, {"url": url, "name": name, "id": name})

        def validate(self, body: bytes) -> None:
            good = json.loads(body)["content"].startswith("---\n")
            self._send(200, {"errors": [] if good else [{"message": "no metadata"}], "warnings": []})

        def info(self, _: bytes, name: str, revision: str | None) -> None:
            if (repo := self._repo(name)) is None:
                return
            if (found := repo.at(revision or "main")) is None:
                self._send(404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"})
                return
            commit, files = found
            siblings = [{"rfilename": n, "size": len(d), "blobId": "x"} for n, d in sorted(files.items())]
            self._send(
                200,
                {
                    "id": name,
                    "modelId": name,
                    "sha": commit,
                    "private": repo.private,
                    "siblings": siblings,
                    "tags": [],
                },
            )

        def preupload(self, body: bytes, name: str) -> None:
            if not self._may_write() or self._repo(name) is None:
                return
            files = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["size"] >= LARGE else "regular",
                    "shouldIgnore": False,
                    "oid": None,
                }
                for f in json.loads(body)["files"]
            ]
            self._send(200, {"files": files, "commitOid": hub.repos[name].commits[-1][0]})

        def batch(self, body: bytes, _name: str) -> None:
            objects = [
                {
                    "oid": o["oid"],
                    "size": o["size"],
                    **(
                        {}
                        if o["oid"] in hub.objects
                        else {"actions": {"upload": {"href": f"{hub.url}/_lfs/{o['oid']}"}}}
                    ),
                }
                for o in json.loads(body)["objects"]
            ]
            self._send(200, {"transfer": "basic", "objects": objects})

        def put_object(self, body: bytes, oid: str) -> None:
            good = hashlib.sha256(body).hexdigest() == oid
            if good:
                hub.objects[oid] = body
            self._send(200 if good else 400, {})

        def commit(self, body: bytes, name: str) -> None:
            if not self._may_write() or (repo := self._repo(name)) is None:
                return
            files = dict(repo.commits[-1][1])
            for line in body.decode().splitlines():
                item = json.loads(line)
                value = item["value"]
                if item["key"] == "header" and value.get("parentCommit") not in (None, repo.commits[-1][0]):
                    self._send(412, {"error": "A commit has happened since. Please refresh and try again."})
                    return
                if item["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif item["key"] == "lfsFile":
                    files[value["path"]] = hub.objects[value["oid"]]
                elif item["key"] == "deletedFile":
                    del files[value["path"]]
            oid = repo.commit(files)
            self._send(
                200,
                {
                    "success": True,
                    "commitOid": oid,
                    "commitUrl": f"{hub.url}/{name}/commit/{oid}",
                    "hookOutput": "",
                },
            )

        def resolve(self, _: bytes, name: str, revision: str, file: str) -> None:
            if (repo := self._repo(name)) is None:
                return
            found = repo.at(revision)
            if found is None or file not in found[1]:
                self._send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
                return
            data = hub.lie.get(file, found[1][file])
            headers = {
                "X-Repo-Commit": found[0],
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "Content-Length": str(len(data)),
                "Accept-Ranges": "bytes",
            }
            self._send(200, data, headers)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = (
    (r"POST /api/validate-yaml", "validate"),
    (r"POST /api/repos/create", "create"),
    (rf"GET /api/models/{NAME}(?:/revision/(.+))?", "info"),
    (rf"POST /api/models/{NAME}/preupload/main", "preupload"),
    (rf"POST /{NAME}\.git/info/lfs/objects/batch", "batch"),
    (r"PUT /_lfs/(\w+)", "put_object"),
    (rf"POST /api/models/{NAME}/commit/main", "commit"),
    (rf"(?:GET|HEAD) /{NAME}/resolve/([^/]+)/(.+)", "resolve"),
)
