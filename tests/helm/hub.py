"""A stand-in for the hub on the loopback: one repository, ranges, and faults on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

REPOSITORY = "org/model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
STALL_LIMIT_S = 60.0
LARGE_BYTES = 4096
"""Files above are declared by SHA-256, smaller ones by git blob id, as the hub does."""


class StandInHub:
    """Serves `files` until closed.

    Attributes:
        files: name -> content; may be changed while serving.
        declared: name -> content that the listing's checksums are of, where it differs.
        stall_after: name -> bytes after which an answer stands still, once, until `stalled` ends.
        token: bearer token that is asked for, "" = none.
        requested: how often each path was asked for by GET, and `ranges` the Range headers seen.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = dict(files)
        self.declared: dict[str, bytes] = {}
        self.stall_after: dict[str, int] = {}
        self.stalled = threading.Event()
        self.token = ""
        self.requested: Counter[str] = Counter()
        self.ranges: list[str] = []
        hub = self

        class Handler(_Handler):
            owner = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def listing(self) -> dict:
        """The answer about the model."""
        return {
            "id": REPOSITORY,
            "modelId": REPOSITORY,
            "sha": COMMIT,
            "private": False,
            "siblings": [self._entry(name) for name in self.files],
        }

    def tree(self) -> list[dict]:
        """The answer about the model's files."""
        entries = []
        for name in self.files:
            entry = self._entry(name)
            found = {"type": "file", "path": name, "size": entry["size"], "oid": entry["blobId"]}
            if "lfs" in entry:
                lfs = entry["lfs"]
                found["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": 130}
            entries.append(found)
        return entries

    def _entry(self, name: str) -> dict:
        content = self.declared.get(name, self.files[name])
        entry = {"rfilename": name, "size": len(content), "blobId": git_sha1(content)}
        if len(content) > LARGE_BYTES:
            sha256 = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
        return entry


def git_sha1(content: bytes) -> str:
    """The id that git gives a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    owner: StandInHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.owner, urlsplit(self.path).path
        if body:
            hub.requested[path] += 1
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._send(401, b'{"error": "unauthorised"}', body, {"X-Error-Code": "GatedRepo"})
        elif re.fullmatch(rf"/api/models/{REPOSITORY}/revision/[\w.-]+", path):
            self._send(200, json.dumps(hub.listing()).encode(), body, {})
        elif re.fullmatch(rf"/api/models/{REPOSITORY}/tree/[\w.-]+", path):
            self._send(200, json.dumps(hub.tree()).encode(), body, {})
        elif match := re.fullmatch(rf"/{REPOSITORY}/resolve/[\w.-]+/(.+)", path):
            self._file(match.group(1), body)
        else:
            self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

    def _file(self, name: str, body: bool) -> None:
        hub = self.owner
        content = hub.files.get(name)
        if content is None:
            self._send(404, b"{}", body, {"X-Error-Code": "EntryNotFound"})
            return
        etag = hashlib.sha256(hub.declared.get(name, content)).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start, status = 0, 200
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            hub.ranges.append(asked.group())
            start, status = int(asked.group(1)), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        stall = hub.stall_after.pop(name, None) if body else None
        self._send(status, content[start:], body, headers, stall=stall)

    def _send(
        self, status: int, content: bytes, body: bool, headers: dict, stall: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body and stall is None:
            self.wfile.write(content)
        elif body:
            self.wfile.write(content[:stall])
            self.wfile.flush()
            self.owner.stalled.wait(STALL_LIMIT_S)
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""
