"""The hub of :mod:`hub_server`: what it answers to which request."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

FLOOD = 200_000_000  # bytes; a client that takes all of it has no limit
LARGE = (".safetensors", ".bin", ".pt", ".gguf")


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass
class Seen:
    """One request as the server saw it."""

    method: str
    path: str
    query: dict[str, list[str]]
    range: str
    token: str
    store: bool
    body: bytes = b""
    status: int = 0
    sent: int = 0


@dataclass
class Fault:
    """What to do instead of the right thing; ``times`` None means always."""

    kind: str
    match: Callable[[Seen], bool]
    times: int | None = None
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # an answer in one packet: no 40 ms for a delayed acknowledgement
    disable_nagle_algorithm = True
    server: Any  # the listener of hub_server
    seen: Seen
    fault: Fault | None

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def handle_any(self) -> None:
        hub, parts = self.server.hub, urlsplit(self.path)
        self.seen = Seen(
            self.command, unquote(parts.path), parse_qs(parts.query), self.headers.get("Range", ""),
            self.headers.get("Authorization", ""), self.server.store, self._body(),
        )  # fmt: skip
        with hub.lock:
            hub.log.append(self.seen)
        self.fault = hub.take(self.seen)
        if self.fault is None or not self._misbehave(self.fault):
            self._route()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _misbehave(self, fault: Fault) -> bool:
        """Whether the answer has been given, or refused, already."""
        if fault.kind == "slow":
            self.server.hub.stopping.wait(20)
        if fault.kind in ("slow", "drop"):
            self.close_connection = True
            return True
        if fault.kind in ("flood", "bomb", "long"):
            self._flood(fault)
        elif fault.kind in ("pages", "elsewhere"):
            hub = self.server.hub
            where = hub.url + self.path if fault.kind == "pages" else f"{hub.store_url}/more"
            self.answer(200, b"[]", {"Content-Type": "application/json", "Link": f'<{where}>; rel="next"'})
        elif fault.kind == "loop":
            self.answer(302, b"", {"Location": self.path})
        elif fault.kind == "status":
            self.answer(fault.status, b'{"error":"no"}', fault.headers)
        elif fault.kind == "garbage":
            self.answer(200, b"<html>Welcome to the hotel</html>", {"Content-Type": "text/html"})
        elif fault.kind == "echo":
            token = self.seen.token
            body = json.dumps({"error": token, "errors": [{"message": token}]}).encode()
            self.answer(403, body, {"X-Error-Message": token, "X-Request-Id": token, "Location": f"/{token}"})
        else:
            return False
        return True

    def _flood(self, fault: Fault) -> None:
        """Much more than anyone wants, until the client hangs up; ``seen.sent`` is what it took, unpacked."""
        self.close_connection = True
        self.send_response(fault.status)
        for name, value in fault.headers.items():
            self.send_header(name, value)
        if fault.kind == "long":
            self.send_header("Content-Length", str(FLOOD))
        else:
            self.send_header("Transfer-Encoding", "chunked")
        if fault.kind == "bomb":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        piece, packer = bytes(1 << 16), zlib.compressobj(9, zlib.DEFLATED, 31)
        with contextlib.suppress(OSError):
            while self.seen.sent < FLOOD and not self.server.hub.stopping.is_set():
                bomb = fault.kind == "bomb"
                data = packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH) if bomb else piece
                self.wfile.write(data if fault.kind == "long" else b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()
                self.seen.sent += len(piece)
            if fault.kind != "long":
                self.wfile.write(b"0\r\n\r\n")

    def _route(self) -> None:
        path, hub = self.seen.path, self.server.hub
        if self.server.store:
            if self.command == "PUT":
                hub.uploads[path] = self.seen.body
                return self.answer(200, b"")
            data = hub.uploads.get(path)
            return self.answer(404, b"") if data is None else self._send(data, {})
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit|branch)/(.+))?", path)
        if found:
            return self._api(found[1], found[2] or "revision", found[3] or "main")
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if found:
            return self._file(found[1], found[2], found[3])
        found = re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path)
        if found:
            return self._batch()
        if path == "/api/repos/create":
            return self._create()
        if path == "/api/validate-yaml":
            front = re.match(r"---\n(.*?)^---$", json.loads(self.seen.body)["content"], re.DOTALL | re.MULTILINE)
            try:
                value = yaml.safe_load(front[1]) if front else {}
                wrong = not isinstance(value, dict) or value.get("license") == "wrong"
            except yaml.YAMLError:
                wrong = True
            told = [{"message": f"no such licence ({self.seen.token})"}]
            return self.json({"warnings": told, "errors": told if wrong else []}, 400 if wrong else 200)
        return self.refuse(404, "", "nothing here")

    def _create(self) -> None:
        """A new repository; only accounts in ``hub.writers`` may have one."""
        hub, wanted = self.server.hub, json.loads(self.seen.body)
        repo_id = f"{wanted['organization']}/{wanted['name']}"
        if self.seen.token.removeprefix("Bearer ") not in hub.tokens:
            return self.refuse(401, "", "no")
        if repo_id in hub.repos:
            return self.json({"url": f"{hub.url}/{repo_id}"}, 409)
        if wanted["organization"] not in hub.writers:
            return self.refuse(403, "", "no rights in this namespace")
        hub.commit(repo_id, {".gitattributes": b"*.safetensors filter=lfs"})
        if wanted.get("visibility") == "private" or wanted.get("private"):
            hub.repos[repo_id].access = "private"
        return self.json({"url": f"{hub.url}/{repo_id}"})

    def _commit(self, repo_id: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit that a request may see; None when it has been refused."""
        hub = self.server.hub
        repo = hub.repos.get(repo_id)
        known = self.seen.token.removeprefix("Bearer ") in hub.tokens
        if repo is None or (repo.access == "private" and not known):
            return self.refuse(404 if known else 401, "RepoNotFound", "Repository not found")
        if repo.access == "gated" and not known:
            return self.refuse(403, "GatedRepo", "Access to this model is restricted")
        sha = repo.refs.get(revision, revision)
        if sha not in repo.commits:
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha, repo.commits[sha]

    def _api(self, repo_id: str, what: str, revision: str) -> None:
        if what == "branch":
            refs = self.server.hub.repos[repo_id].refs
            status = 409 if revision in refs else 200
            refs.setdefault(revision, refs["main"])
            return self.json({}, status)
        below = ""
        if what == "tree" and not revision.startswith("refs/"):
            revision, _, below = revision.partition("/")
        at = self._commit(repo_id, revision)
        if at is None:
            return None
        sha, files = at
        files = {name: data for name, data in files.items() if name.startswith(below)}
        if not files and below:
            return self.refuse(404, "EntryNotFound", "no such folder")
        if what == "preupload":
            wanted = json.loads(self.seen.body)["files"]
            modes = [(item["path"], "lfs" if item["path"].endswith(LARGE) else "regular") for item in wanted]
            self.json({"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes]})
        elif what == "commit":
            hub, new = self.server.hub, dict(files)
            for line in self.seen.body.splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    new[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
                elif item["key"] == "lfsFile":
                    new[item["value"]["path"]] = hub.uploads["/up/" + item["value"]["oid"]]
                elif item["key"] == "deletedFile":
                    del new[item["value"]["path"]]
                else:
                    hub.messages.append(item["value"]["summary"])
            request = "create_pr" in self.seen.query
            number = 1 + sum(ref.startswith("refs/pr/") for ref in hub.repos[repo_id].refs)
            sha = hub.commit(repo_id, new, f"refs/pr/{number}" if request else revision)
            base = f"{hub.url}/{repo_id}"
            told = {"pullRequestUrl": f"{base}/discussions/{number}"} if request else {}
            self.json({"commitUrl": f"{base}/commit/{sha}", "commitOid": sha, **told})
        elif what == "tree":
            self.json([self._entry(name, data, "oid") for name, data in files.items()])
        else:
            siblings = [self._entry(name, data, "sha256") for name, data in files.items()]
            private = self.server.hub.repos[repo_id].access == "private"
            self.json({"id": repo_id, "modelId": repo_id, "sha": sha, "private": private, "siblings": siblings})
        return None

    @staticmethod
    def _entry(name: str, data: bytes, digest: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": git_sha1(data)}
        if digest == "sha256":
            entry = {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
        if name.endswith(LARGE):
            entry["lfs"] = {digest: hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry

    def _file(self, repo_id: str, revision: str, name: str) -> None:
        at = self._commit(repo_id, revision)
        if at is None:
            return
        sha, files = at
        if name not in files:
            self.refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": sha})
            return
        data = files[name]
        told = {"X-Repo-Commit": "f" * 40 if self.fault is not None and self.fault.kind == "commit" else sha}
        if not name.endswith(LARGE):
            self._send(data, {**told, "ETag": f'"{git_sha1(data)}"'})
            return
        digest = hashlib.sha256(data).hexdigest()
        place = f"/store/{repo_id}/{digest}/{name}"
        self.server.hub.uploads[place] = data
        self.answer(302, b"", {
            **told, "Location": f"{self.server.hub.store_url}{place}?Signature=abc", "X-Linked-Size": str(len(data)),
            "X-Linked-Etag": f'"{digest}"', "ETag": f'"{digest}"',
        })  # fmt: skip

    def _batch(self) -> None:
        wanted = json.loads(self.seen.body)["objects"]
        up = f"{self.server.hub.store_url}/up/"
        objects = [{**item, "actions": {"upload": {"href": up + item["oid"]}}} for item in wanted]
        self.json({"transfer": "basic", "objects": objects})

    def _send(self, data: bytes, headers: dict[str, str]) -> None:
        """A file, or the part of it that is asked for."""
        kind = self.fault.kind if self.fault is not None else ""
        if kind == "shrunk":
            data = data[: len(data) // 2]
        if kind == "gzip":
            headers = {**headers, "Content-Encoding": "gzip"}
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.seen.range)
        if not found or kind == "ignore_range":
            return self.answer(200, data, headers)
        start, end = int(found[1]), min(int(found[2] or len(data)) + 1, len(data))
        if start >= len(data):
            return self.answer(416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"})
        start += kind == "wrong_range"
        return self.answer(206, data[start:end], {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"})

    def refuse(self, status: int, code: str, text: str, headers: dict[str, str] | None = None) -> None:
        self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": text, **(headers or {})})

    def json(self, value: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.seen.status = status
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.fault is not None and self.fault.kind == "half" and status < 300 and self.command == "GET":
            body = body[: len(body) // 2]
            self.close_connection = True
        if self.command != "HEAD":
            self.seen.sent = len(body)
            self.wfile.write(body)


for _verb in ("GET", "HEAD", "POST", "PUT"):
    setattr(Handler, f"do_{_verb}", Handler.handle_any)
