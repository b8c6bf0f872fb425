"""A stand-in for the Hugging Face Hub on loopback: the part of its HTTP API that huggingface_hub asks for, and faults.

    with hub_server.start(tmp_path / "hub") as hub:         # repos are folders: tmp_path/hub/datasets/OWNER/NAME/...
        hub.faults.append(Fault("drop", "000001.npy"))      # the next download of that file breaks off half-way
        run_script("hub.py", "pull-data", "tester/tokens", out, env=hub.env())

Only the newest revision is kept.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

USER = "tester"  # whom the token belongs to: may write to tester/*, nothing else
LFS_SUFFIXES = (".npy", ".bin", ".pt", ".parquet", ".safetensors", ".png")
INVALID = "Invalid credentials in Authorization header"
REPO_URL = re.compile(
    r"/api/(models|datasets)/([^/]+/[^/]+?)(?:/(revision|tree|paths-info|preupload|commit|auth-check)/([^/]+)(?:/(.+))?)?"
)


@dataclass
class Fault:
    """What goes wrong, for the next `times` requests whose path contains `path`.

    kind: drop (connection lost half-way through the body), status (answer `code`), corrupt (one byte flipped),
    html (a web page instead of the answer).
    """

    kind: str
    path: str
    times: int = 1
    code: int = 500
    message: str = "planted fault"
    method: str | None = None  # GET, HEAD, POST, PUT; None: GET for drop and corrupt, any for the others


@dataclass
class Hub:
    root: Path
    token: str
    url: str = ""
    faults: list[Fault] = field(default_factory=list)
    private: set[str] = field(default_factory=set)  # "datasets/OWNER/NAME" seen only with the token
    read_only: bool = False  # whether the token may read, but not write
    log: list[tuple[str, str, int, str]] = field(default_factory=list)  # method, path, status, Range
    extra_tree: list[dict] = field(default_factory=list)  # hostile entries added to every listing
    lock: threading.Lock = field(default_factory=threading.Lock)

    def env(self, token: bool = True) -> dict[str, str]:
        """Environment of a script that is to talk to this Hub and to nothing else."""
        home = str(self.root.parent / "hf-home")
        auth = {"HF_TOKEN": self.token if token else "", "HF_HOME": home}
        return {"HF_ENDPOINT": self.url, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **auth}

    def count(self, method: str, part: str) -> int:
        return sum(m == method and part in p for m, p, _, _ in self.log)

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for f in self.faults:
                wanted = f.method or ("GET" if f.kind in ("drop", "corrupt") else method)
                if f.times > 0 and f.path in path and wanted == method:
                    f.times -= 1
                    return f
        return None


def entry(name: str, path: Path) -> dict:
    """A file as a listing has it."""
    data = path.read_bytes()
    out = {"type": "file", "path": name, "size": len(data)}
    out["oid"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # git's
    if path.suffix in LFS_SUFFIXES:
        out["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return out


def content_hash(path: Path) -> str:
    found = entry(path.name, path)
    return found.get("lfs", found)["oid"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that was killed
            super().handle()

    def answer(self, body: bytes | dict | list = b"", status: int = 200, **headers: str) -> None:
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        self.hub.log.append((self.command, self.path, status, self.headers.get("Range", "")))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        fault = self.fault and self.fault.kind
        if fault == "drop":
            body, self.close_connection = body[: len(body) // 2], True
        elif fault == "corrupt":
            body = body[:-1] + bytes(b ^ 1 for b in body[-1:])
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str = "", message: str = "") -> None:
        self.answer({"error": message or code}, status, X_Error_Code=code, X_Error_Message=message or code)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def at(self, kind: str, repo: str, revision: str) -> tuple[Path, str] | None:
        """Folder and newest revision of a repo this caller may see; None (after answering) otherwise."""
        if self.headers.get("Authorization") and not self.authorized:
            return self.refuse(401, message=INVALID)
        folder, hidden = self.hub.root / kind / repo, f"{kind}/{repo}" in self.hub.private and not self.authorized
        if hidden or not folder.is_dir():
            return self.refuse(404 if self.authorized else 401, "RepoNotFound", "Repository not found")
        if revision not in ("main", sha := self.revision(folder)):
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return folder, sha

    @property
    def authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def files(self, folder: Path) -> dict[str, Path]:
        return {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}

    def revision(self, folder: Path) -> str:
        """Commit hash: a function of the names, sizes and times of what is there."""
        facts = [(name, p.stat().st_size, p.stat().st_mtime_ns) for name, p in self.files(folder).items()]
        return hashlib.sha1(repr(facts).encode()).hexdigest()

    def handle_request(self) -> None:
        data = self.body()
        self.fault = self.hub.take_fault(self.command, self.path)
        if self.fault and self.fault.kind == "status":
            return self.answer({"error": self.fault.message}, self.fault.code)
        if self.fault and self.fault.kind == "html":
            return self.answer(b"<html><body>Please log in to this network</body></html>", Content_Type="text/html")
        if self.fault and self.fault.kind == "drop" and self.command == "PUT":
            self.close_connection = True
            return None
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.resolve(match[1] or "models/", match[2], match[3], match[4])
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.lfs_batch(json.loads(data))
        if self.command == "PUT" and path.startswith("/lfs/"):
            return self.lfs_put(path.removeprefix("/lfs/"), data)
        if match := REPO_URL.fullmatch(path):
            return self.api(match[1], match[2], match[3] or "revision", match[4] or "main", match[5] or "", data)
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path in ("/api/whoami-v2", "/api/repos/create") and not self.authorized:
            return self.refuse(401, message=INVALID)
        if path == "/api/whoami-v2":
            return self.answer({"type": "user", "name": USER, "orgs": [], "auth": {"type": "access_token"}})
        if path == "/api/repos/create":
            return self.create(json.loads(data))
        return self.refuse(404, message=f"the stand-in has no {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def create(self, wish: dict) -> None:
        owner, kind = wish.get("organization") or USER, wish.get("type", "model") + "s"
        if owner != USER or self.hub.read_only:
            return self.refuse(403, message=f"You don't have the rights to create a {wish['type']} under {owner}")
        repo = f"{kind}/{owner}/{wish['name']}"
        url = f"{self.hub.url}/{'' if kind == 'models' else kind + '/'}{owner}/{wish['name']}"
        if (self.hub.root / repo).exists():
            return self.answer({"url": url, "error": "You already created this repo"}, 409)
        (self.hub.root / repo).mkdir(parents=True)
        if wish.get("private") or wish.get("visibility") == "private":
            self.hub.private.add(repo)
        return self.answer({"url": url, "name": f"{owner}/{wish['name']}"})

    def api(self, kind: str, repo: str, verb: str, revision: str, under: str, data: bytes) -> None:
        if (at := self.at(kind, repo, "main" if verb == "auth-check" else revision)) is None:
            return None
        (folder, sha), files = at, self.files(at[0])
        if verb == "revision":
            siblings = [{"rfilename": name} for name in files]
            private = f"{kind}/{repo}" in self.hub.private
            return self.answer({"id": repo, "sha": sha, "private": private, "siblings": siblings, "tags": []})
        if verb == "tree":
            listed = [entry(n, p) for n, p in files.items() if n.startswith(f"{under}/" if under else "")]
            return self.answer(listed + self.hub.extra_tree)
        if verb == "paths-info":
            wanted = parse_qs(data.decode()).get("paths", [])
            return self.answer([entry(n, files[n]) for n in wanted if n in files])
        if not self.authorized or not repo.startswith(f"{USER}/") or self.hub.read_only:
            return self.refuse(403, message="no write permission")
        if verb == "auth-check":
            return self.answer()
        if verb == "preupload":
            out = []
            for f in json.loads(data)["files"]:
                there, lfs = files.get(f["path"]), Path(f["path"]).suffix in LFS_SUFFIXES
                mode = {"uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
                out.append({"path": f["path"], **mode, "oid": there and content_hash(there)})
            return self.answer({"files": out, "commitOid": sha})
        return self.commit(kind, repo, folder, [json.loads(line) for line in data.splitlines()])

    def commit(self, kind: str, repo: str, folder: Path, lines: list[dict]) -> None:
        for line in lines[1:]:
            value, blob = line["value"], self.hub.root / ".lfs" / line["value"].get("oid", "")
            if line["key"] == "lfsFile" and not blob.is_file():
                return self.refuse(400, message=f"LFS object {value['oid']} was not uploaded")
            if line["key"] in ("file", "lfsFile"):
                (path := folder / value["path"]).parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(base64.b64decode(value["content"]) if line["key"] == "file" else blob.read_bytes())
        sha = self.revision(folder)
        return self.answer({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}"})

    def lfs_batch(self, ask: dict) -> None:
        out = []
        for o in ask["objects"]:
            href = f"{self.hub.url}/lfs/{o['oid']}"
            there = (self.hub.root / ".lfs" / o["oid"]).is_file()
            out.append(o if there else {**o, "actions": {"upload": {"href": href}}})
        self.answer({"transfer": "basic", "objects": out})

    def lfs_put(self, oid: str, data: bytes) -> None:
        if hashlib.sha256(data).hexdigest() != oid:
            return self.refuse(400, message="sha256 does not match")
        (self.hub.root / ".lfs").mkdir(exist_ok=True)
        (self.hub.root / ".lfs" / oid).write_bytes(data)
        return self.answer()

    def resolve(self, kind: str, repo: str, revision: str, name: str) -> None:
        if (at := self.at(kind.rstrip("/"), repo, revision)) is None:
            return None
        folder, sha = at
        if (path := self.files(folder).get(name)) is None:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        data = path.read_bytes()
        headers = {"X_Repo_Commit": sha, "Accept_Ranges": "bytes", "ETag": f'"{content_hash(path)}"'}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
            headers["Content_Range"] = f"bytes {start}-{end}/{len(data)}"
            return self.answer(data[start : end + 1], 206, **headers)
        return self.answer(data, 200, **headers)


@contextmanager
def start(root: Path, *, token: str = "hf_testPlantedTokenNeverPrinted") -> Iterator[Hub]:
    """Serve the repos under `root` on a free port of 127.0.0.1 until the block ends; yields the Hub."""
    root.mkdir(parents=True, exist_ok=True)
    hub = Hub(root, token)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
