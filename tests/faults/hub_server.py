"""A stand-in for the Hugging Face Hub on loopback, with faults on demand, so that tests need no network.

    with hub_server.start(tmp_path / "hub") as hub:         # repos are folders: tmp_path/hub/datasets/OWNER/NAME/...
        hub.faults.append(Fault("drop", "000001.npy"))      # the next download of that file breaks off half-way
        run_script("hub.py", "pull-data", "tester/tokens", out, env=hub.env())

It speaks the part of the Hub's HTTP API that huggingface_hub uses for what this project does. KIND is models or
datasets; in download and Git LFS addresses a model's has no prefix.

    request                                        answer
    ---------------------------------------------  ------------------------------------------------------------------
    POST /api/repos/create                         make a repository
    GET  /api/KIND/OWNER/NAME[/revision/REV]       the commit, whether it is private, the names of the files
    GET  /api/KIND/OWNER/NAME/tree/REV[/FOLDER]    the folders, and the files with sizes and hashes
    GET  /api/KIND/OWNER/NAME/auth-check/write     whether the token may write
    POST /api/KIND/OWNER/NAME/preupload/REV        for each file of a commit: as LFS object, or inside the commit
    POST /OWNER/NAME.git/info/lfs/objects/batch    for each LFS object: where to upload it, unless it is here already
    PUT  /lfs/SHA256                               the upload of one object
    POST /api/KIND/OWNER/NAME/commit/REV           add files to the repository, or remove some; lines of JSON
    GET  /api/KIND/OWNER/NAME/lfs-files            the stored objects, those of removed files included
    POST /api/KIND/OWNER/NAME/lfs-files/batch      delete stored objects for good
    GET  /OWNER/NAME/resolve/REV/FILE              a download, whole or a range of bytes; HEAD for its size and hash

Not here: branches and old revisions (only the newest is kept), pages of long listings, and the network protocol of Xet
storage, which has a folder in its place.
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
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

USER = "tester"  # the token's user, who may write to tester/* and nothing else
STORAGE_LIMIT = "Private repository storage limit reached, please upgrade your plan"

# Files that the Hub stores as LFS objects, by sha256. The others are stored in git itself, by git's own hash.
LFS_SUFFIXES = (".npy", ".bin", ".pt", ".parquet", ".safetensors", ".png")

REPO_URL = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+?)"
    r"(?:/(?P<action>revision|tree|preupload|commit|auth-check|lfs-files)(?:/(?P<revision>[^/]+)(?:/(?P<folder>.+))?)?)?"
)
DOWNLOAD_URL = re.compile(r"/(?P<kind>datasets/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Fault:
    """What goes wrong, for the next `times` requests whose path contains `path`. kind: drop (connection lost half-way
    through the body), corrupt (one byte flipped), or status (answer `code`)."""

    kind: str
    path: str
    times: int = 1
    code: int = 500
    message: str = "planted fault"
    method: str | None = None  # None: GET for drop and corrupt, any for status


@dataclass
class Hub:
    """The state of the stand-in, which tests change and look at while it runs."""

    root: Path
    token: str
    url: str = ""
    faults: list[Fault] = field(default_factory=list)
    private: set[str] = field(default_factory=set)  # "datasets/OWNER/NAME" seen only with the token
    objects: dict[str, dict[str, str]] = field(default_factory=dict)  # of each repository, by sha256: a file's name
    read_only: bool = False  # whether the token may read, but not write
    log: list[tuple[str, str, int, str]] = field(default_factory=list)  # method, path, status, Range
    extra_tree: list[dict] = field(default_factory=list)  # hostile entries added to every listing
    xet_hashes: dict[str, str] = field(default_factory=dict)  # {sha256: hash} of files that are in Xet storage, too
    quota: int | None = None  # bytes of stored objects that the account may have; None: no limit
    lock: threading.Lock = field(default_factory=threading.Lock)

    def env(self, token: bool = True) -> dict[str, str]:
        """Environment of a script that is to talk to this Hub and to nothing else."""
        home = str(self.root.parent / "hf-home")
        auth = {"HF_TOKEN": self.token if token else "", "HF_HOME": home}
        return {"HF_ENDPOINT": self.url, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **auth}

    @property
    def xet_storage(self) -> str:
        """The address of the Xet storage: a folder, which hf_xet itself reads and writes."""
        return f"local://{self.root.parent / 'xet-storage'}"

    def store_in_xet(self, folder: Path) -> None:
        """Put the large files of a repository into the Xet storage. Call it in a process of the test alone."""
        import hf_xet

        paths = [str(path) for path in sorted(folder.iterdir()) if path.suffix in LFS_SUFFIXES]
        for stored in hf_xet.upload_files(paths, self.xet_storage, None, None, None, None):
            self.xet_hashes[stored.sha256] = stored.hash

    def count(self, method: str, part: str) -> int:
        """How many requests of this method, with this part of a path, have been answered."""
        return sum(logged_method == method and part in path for logged_method, path, _, _ in self.log)

    def take_fault(self, method: str, path: str) -> Fault | None:
        """The fault that hits this request, if any; it counts as used. Requests come from several threads."""
        with self.lock:
            for fault in self.faults:
                default_method = method if fault.kind == "status" else "GET"
                if fault.times > 0 and fault.path in path and (fault.method or default_method) == method:
                    fault.times -= 1
                    return fault
        return None

    def object_path(self, sha256: str) -> Path:
        """Where an LFS object is stored."""
        return self.root / ".lfs" / sha256

    def used_bytes(self) -> int:
        """What all stored objects take."""
        return sum(path.stat().st_size for path in (self.root / ".lfs").glob("*"))


def list_file(name: str, path: Path) -> dict:
    """A file as the Hub lists it: git's hash and, for an LFS file, its sha256."""
    data = path.read_bytes()
    listed = {"type": "file", "path": name, "size": len(data)}
    listed["oid"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if path.suffix in LFS_SUFFIXES:
        listed["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return listed


def content_hash(path: Path) -> str:
    """The hash by which the Hub knows a file: sha256 for LFS, else git's."""
    listed = list_file(path.name, path)
    return listed.get("lfs", listed)["oid"]


def list_paths(folder: Path) -> dict[str, Path]:
    """The files of a repository by their path in it."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def commit_hash(folder: Path) -> str:
    """The repository's newest commit: a function of the names, sizes and times of what is there."""
    facts = [(name, p.stat().st_size, p.stat().st_mtime_ns) for name, p in list_paths(folder).items()]
    return hashlib.sha1(repr(facts).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """One connection. `hub` is set on the subclass that `start` makes."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args) -> None:
        pass  # the base class prints every request

    def handle(self) -> None:
        with suppress(ConnectionError):  # a client that was killed
            super().handle()

    # ------------------------------------------------------------------------- reading and answering

    def read_body(self) -> bytes:
        """The body of the request, sent in one piece or in chunks (its length, the chunk, an empty line)."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while not chunks or chunks[-1]:
            size = int(self.rfile.readline(), 16)
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        return b"".join(chunks)

    def answer(self, body: bytes | dict | list = b"", status: int = 200, **headers: str) -> None:
        """Send an answer, as JSON unless it is bytes, and log the request. `_` in a header's name stands for `-`."""
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        # Logged before it is sent, so that a test which sees the answer also sees the log.
        self.hub.log.append((self.command, self.path, status, self.headers.get("Range", "")))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

        # Faults that spoil the body: the headers have promised all of it.
        if self.fault and self.fault.kind == "drop":
            body = body[: len(body) // 2]
            self.close_connection = True
        elif self.fault and self.fault.kind == "corrupt":
            body = body[:-1] + bytes(byte ^ 1 for byte in body[-1:])
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_error(self, status: int, message: str, code: str = "") -> None:
        """An error as the Hub sends it: huggingface_hub looks at these two headers."""
        self.answer({"error": message}, status, X_Error_Code=code, X_Error_Message=message)

    @property
    def authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def find_repo(self, kind: str, repo: str, revision: str) -> Path | None:
        """The folder of a repository that this caller may see; None, after answering, otherwise."""
        # A wrong token is an error even for a public repository.
        if self.headers.get("Authorization") and not self.authorized:
            return self.answer_error(401, "Invalid credentials in Authorization header")
        # As the Hub does: without a token, a private repository looks like one that does not exist.
        folder = self.hub.root / kind / repo
        is_hidden = f"{kind}/{repo}" in self.hub.private and not self.authorized
        if is_hidden or not folder.is_dir():
            return self.answer_error(404 if self.authorized else 401, "Repository not found", "RepoNotFound")
        if revision not in ("main", "write", "batch", commit_hash(folder)):
            return self.answer_error(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return folder

    # ------------------------------------------------------------------------- choosing the action

    def handle_request(self) -> None:
        """Answer one request: choose the action by its method and path. See the table in the module's docstring."""
        data = self.read_body()
        self.fault = self.hub.take_fault(self.command, self.path)
        if self.fault and self.fault.kind == "status":
            return self.answer({"error": self.fault.message}, self.fault.code)

        # Files up and down.
        path = unquote(urlsplit(self.path).path)
        if match := DOWNLOAD_URL.fullmatch(path):
            return self.download(match["kind"] or "models/", match["repo"], match["revision"], match["file"])
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.offer_uploads(json.loads(data))
        if self.command == "PUT" and path.startswith("/lfs/"):
            return self.store_object(path.removeprefix("/lfs/"), data)

        # A token for the Xet storage, which is asked for only if the storage is known.
        if "/xet-read-token/" in path:
            headers = {"X_Xet_Cas_Url": self.hub.xet_storage, "X_Xet_Access_Token": "xet-token"}
            return self.answer(b"", 200, X_Xet_Token_Expiration=str(2**31), **headers)

        # Repositories.
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create_repo(json.loads(data))
        if match := REPO_URL.fullmatch(path):
            return self.call_api(**match.groupdict(), data=data)
        return self.answer_error(404, f"the stand-in has no {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def call_api(
        self, kind: str, repo: str, action: str | None, revision: str | None, folder: str | None, data: bytes
    ) -> None:
        """One action on one repository; `folder` is the folder of a listing, `data` the body of the request."""
        root = self.find_repo(kind, repo, revision or "main")
        if root is None:
            return None
        files = list_paths(root)
        if action in (None, "revision"):
            siblings = [{"rfilename": name} for name in files]
            facts = {"id": repo, "sha": commit_hash(root), "private": f"{kind}/{repo}" in self.hub.private}
            return self.answer({**facts, "siblings": siblings, "tags": []})
        if action == "tree":
            return self.list_tree(files, folder or "")

        # Writing.
        if not self.authorized or not repo.startswith(f"{USER}/") or self.hub.read_only:
            return self.answer_error(403, "no write permission")
        if action == "auth-check":
            return self.answer()
        if action == "preupload":
            return self.choose_upload_modes(json.loads(data)["files"], files, commit_hash(root))
        if action == "commit":
            return self.commit(f"{kind}/{repo}", root, [json.loads(line) for line in data.splitlines()])
        return self.manage_objects(self.hub.objects.setdefault(f"{kind}/{repo}", {}), data)

    # ------------------------------------------------------------------------- writing

    def create_repo(self, request: dict) -> None:
        """Make the folder of a new repository, if the token may."""
        if not self.authorized:
            return self.answer_error(401, "Invalid credentials in Authorization header")
        # The owner is the token's user unless the request names another.
        owner = request.get("organization") or USER
        kind = request.get("type", "model") + "s"
        if owner != USER or self.hub.read_only:
            return self.answer_error(403, f"You don't have the rights to create a {request['type']} under {owner}")

        repo = f"{kind}/{owner}/{request['name']}"
        url = f"{self.hub.url}/{repo.removeprefix('models/')}"
        # It exists: with exist_ok, huggingface_hub accepts this answer.
        if (self.hub.root / repo).exists():
            return self.answer({"url": url, "error": "You already created this repo"}, 409)
        (self.hub.root / repo).mkdir(parents=True)
        if request.get("private") or request.get("visibility") == "private":
            self.hub.private.add(repo)
        return self.answer({"url": url, "name": f"{owner}/{request['name']}"})

    def choose_upload_modes(self, requested: list[dict], files: dict[str, Path], commit: str) -> None:
        """For each file of a commit to come: how to send it, and the hash of the one that is there."""
        modes = []
        for file in requested:
            name = file["path"]
            mode = "lfs" if Path(name).suffix in LFS_SUFFIXES else "regular"
            existing = content_hash(files[name]) if name in files else None
            modes.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": existing})
        self.answer({"files": modes, "commitOid": commit})

    def offer_uploads(self, request: dict) -> None:
        """For each LFS object: where to upload it. One that is here is offered without an action, so that it is not
        sent again. A full account is refused before anything is uploaded."""
        new = [wanted for wanted in request["objects"] if not self.hub.object_path(wanted["oid"]).is_file()]
        needed = self.hub.used_bytes() + sum(wanted["size"] for wanted in new)
        if self.hub.quota is not None and new and needed > self.hub.quota:
            return self.answer_error(403, STORAGE_LIMIT)
        for wanted in new:
            wanted["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
        return self.answer({"transfer": "basic", "objects": request["objects"]})

    def store_object(self, sha256: str, data: bytes) -> None:
        """Store the bytes of an LFS object. An upload that was changed on its way is refused, as the Hub does."""
        if hashlib.sha256(data).hexdigest() != sha256:
            return self.answer_error(400, "sha256 does not match")
        self.hub.object_path(sha256).parent.mkdir(exist_ok=True)
        self.hub.object_path(sha256).write_bytes(data)
        return self.answer()

    def commit(self, repo: str, folder: Path, lines: list[dict]) -> None:
        """Add the files of a commit, and remove some: the first line is its header, each other one a file with its
        content (base64) or the hash of an LFS object."""
        for line in lines[1:]:
            value = line["value"]
            target = folder / value["path"]
            if line["key"] == "deletedFile":
                target.unlink()
                continue
            if line["key"] == "lfsFile":
                content = self.hub.object_path(value["oid"]).read_bytes()
                self.hub.objects.setdefault(repo, {})[value["oid"]] = value["path"]
            else:
                content = base64.b64decode(value["content"])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        commit = commit_hash(folder)
        return self.answer({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/x/y/commit/{commit}"})

    def manage_objects(self, objects: dict[str, str], data: bytes) -> None:
        """GET lists the stored objects of a repository, POST deletes some for good."""
        if self.command == "GET":
            times = {"pushedAt": "2026-11-01T00:00:00.000Z"}
            listed = [{"fileOid": sha256, "oid": sha256, "filename": name, **times} for sha256, name in objects.items()]
            return self.answer([{**entry, "size": 1} for entry in listed])
        for sha256 in json.loads(data)["deletions"]["sha"]:
            del objects[sha256]
            self.hub.object_path(sha256).unlink()
        return self.answer({})

    # ------------------------------------------------------------------------- reading

    def list_tree(self, files: dict[str, Path], folder_name: str) -> None:
        """The folders and files below a folder, or without recursive=true only those directly in it."""
        prefix = f"{folder_name}/" if folder_name else ""
        below = [name for name in files if name.startswith(prefix)]
        if folder_name and not below:
            return self.answer_error(404, "Entry not found", "EntryNotFound")
        folders = {parent.as_posix() for name in below for parent in PurePosixPath(name).parents if parent.name}
        inside = [name for name in (*sorted(folders), *below) if name.startswith(prefix)]
        if "recursive=true" not in self.path.lower():
            inside = [name for name in inside if "/" not in name.removeprefix(prefix)]

        listed = []
        for name in inside:
            as_folder = {"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(name.encode()).hexdigest()}
            listed.append(list_file(name, files[name]) if name in files else as_folder)
        return self.answer(listed + self.hub.extra_tree)

    def download(self, kind: str, repo: str, revision: str, name: str) -> None:
        """A file or a range of its bytes. The hash is in ETag, the commit in X-Repo-Commit."""
        folder = self.find_repo(kind.rstrip("/"), repo, revision)
        if folder is None:
            return None
        # Looked up in the listing, so that no name leads out of the folder.
        path = list_paths(folder).get(name)
        if path is None:
            return self.answer_error(404, "Entry not found", "EntryNotFound")

        data = path.read_bytes()
        commit = commit_hash(folder)
        headers = {"X_Repo_Commit": commit, "Accept_Ranges": "bytes", "ETag": f'"{content_hash(path)}"'}
        # A file in Xet storage says so, and where to get a token for it.
        xet_hash = self.hub.xet_hashes.get(content_hash(path))
        if xet_hash:
            token_url = f"{self.hub.url}/api/{kind}{repo}/xet-read-token/{commit}"
            headers |= {"X_Xet_Hash": xet_hash, "X_Xet_Refresh_Route": token_url}

        # A range, such as bytes=1000-, continues an interrupted download.
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start = int(match[1])
            end = min(int(match[2] or len(data)), len(data) - 1)
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
