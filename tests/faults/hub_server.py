"""A stand-in for the Hugging Face Hub on loopback, with faults on demand, so that tests need no network.

    with hub_server.start(tmp_path / "hub") as hub:         # repos are folders: tmp_path/hub/datasets/OWNER/NAME/...
        hub.faults.append(Fault("drop", "000001.npy"))      # the next download of that file breaks off half-way
        run_script("hub.py", "pull-data", "tester/tokens", out, env=hub.env())

It speaks the part of the Hub's HTTP API that huggingface_hub uses for what this project does. KIND is models or
datasets; in download and Git LFS addresses a model's has no prefix. A branch is a folder NAME@BRANCH.

    request                                        answer
    ---------------------------------------------  ------------------------------------------------------------------
    POST /api/repos/create                         make a repository
    GET  /api/KIND/OWNER/NAME[/revision/REV]       the commit, whether it is private, the files with sizes and hashes
    GET  /api/KIND/OWNER/NAME/tree/REV[/FOLDER]    the folders and files
    GET  /api/KIND/OWNER/NAME/auth-check/write     whether the token may write
    POST /api/KIND/OWNER/NAME/preupload/REV        for each file of a commit: as LFS object, or inside the commit
    POST /OWNER/NAME.git/info/lfs/objects/batch    for each LFS object: where to upload it, unless it is here already
    PUT  /lfs/SHA256                               the upload of one object
    POST /api/KIND/OWNER/NAME/commit/REV           add files to a branch, or remove some; lines of JSON
    POST /api/KIND/OWNER/NAME/branch/BRANCH        make a branch of main; DELETE removes it
    POST /api/KIND/OWNER/NAME/super-squash/BRANCH  delete the stored objects that no branch has any more
    GET  /OWNER/NAME/resolve/REV/FILE              a download, whole or a range of bytes; HEAD for its size and hash

Not here: old revisions, pages of long listings, Xet storage.
"""

import base64
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

USER = "tester"  # the token's user, who may write to tester/* and nothing else

# Files that the Hub stores as LFS objects, by sha256. The others are stored in git itself, by git's own hash.
LFS_SUFFIXES = (".npy", ".bin", ".pt", ".parquet", ".safetensors", ".png")

REPO_URL = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/([^/]+)/([^/]+))?(?:/(.+))?")
DOWNLOAD_URL = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


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
    log: list[tuple[str, str, int]] = field(default_factory=list)  # method, path, status
    extra_tree: list[dict] = field(default_factory=list)  # hostile entries added to every listing

    def env(self) -> dict[str, str]:
        """Environment of a script that is to talk to this Hub and to nothing else."""
        hub = {"HF_ENDPOINT": self.url, "HF_TOKEN": self.token, "HF_HOME": str(self.root.parent / "hf-home")}
        return {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **hub}

    def count(self, method: str, part: str) -> int:
        """How many requests of this method, with this part of a path, have been answered."""
        return sum(logged_method == method and part in path for logged_method, path, _ in self.log)

    def take_fault(self, method: str, path: str) -> Fault | None:
        """The fault that hits this request, if any; it counts as used."""
        for fault in self.faults:
            default_method = method if fault.kind == "status" else "GET"
            if fault.times > 0 and fault.path in path and (fault.method or default_method) == method:
                fault.times -= 1
                return fault
        return None


def list_files(folder: Path) -> dict[str, dict]:
    """The files of a branch by path, as the Hub lists them: git's hash and, for an LFS file, its sha256."""
    listed = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        data = path.read_bytes()
        git_hash = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        listed[name] = {"type": "file", "path": name, "rfilename": name, "size": len(data), "oid": git_hash}
        if path.suffix in LFS_SUFFIXES:
            sha256 = hashlib.sha256(data).hexdigest()
            listed[name]["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(data), "pointerSize": 134}
    return listed


def content_hash(listed: dict) -> str:
    """The hash by which the Hub knows a file: sha256 for LFS, else git's."""
    return listed.get("lfs", listed)["oid"]


def commit_hash(folder: Path) -> str:
    """A hash of everything in a branch, in the place of a commit's."""
    files = [folder.name, *((name, listed["oid"]) for name, listed in list_files(folder).items())]
    return hashlib.sha1(str(files).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers one request: see the table in the module's docstring."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def answer(self, body: bytes | dict | list = b"", status: int = 200, **headers: str) -> None:
        """Send an answer, as JSON unless it is bytes, and log the request. `_` in a header's name stands for `-`."""
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        # Logged before it is sent, so that a test which sees the answer also sees the log.
        self.hub.log.append((self.command, self.path, status))
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

    def read_body(self) -> bytes:
        """The body of a request; an upload comes in chunks, each with its length."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while not chunks or chunks[-1]:
            chunks.append(self.rfile.read(int(self.rfile.readline(), 16)))
            self.rfile.readline()
        return b"".join(chunks)

    def handle_request(self) -> None:
        data = self.read_body()
        self.fault = self.hub.take_fault(self.command, self.path)
        if self.fault and self.fault.kind == "status":
            return self.answer({"error": self.fault.message}, self.fault.code)
        # A wrong token is an error even for a public repository.
        token = self.headers.get("Authorization")
        self.authorized = token == f"Bearer {self.hub.token}"
        if token and not self.authorized:
            return self.answer_error(401, "Invalid credentials in Authorization header")

        path = unquote(urlsplit(self.path).path)
        if match := DOWNLOAD_URL.fullmatch(path):
            kind, repo, revision, name = match.groups()
            return self.download(self.find_branch((kind or "models/")[:-1], repo, revision), name)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.offer_uploads(json.loads(data)["objects"])
        if path.startswith("/lfs/"):
            (self.hub.root / ".lfs").mkdir(exist_ok=True)
            (self.hub.root / ".lfs" / path.removeprefix("/lfs/")).write_bytes(data)
            return self.answer()
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create_repo(json.loads(data))
        if match := REPO_URL.fullmatch(path):
            return self.call_api(*match.groups(), data)
        return self.answer_error(404, f"the stand-in has no {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_request

    def find_branch(self, kind: str, repo: str, revision: str | None) -> Path | None:
        """The folder of a branch, by its name or its commit, that this caller may see; None, after answering, if there
        is none."""
        # Without a token, a private repository looks like one that does not exist.
        main = self.hub.root / kind / repo
        is_hidden = f"{kind}/{repo}" in self.hub.private and not self.authorized
        if is_hidden or not main.is_dir():
            return self.answer_error(404 if self.authorized else 401, "Repository not found", "RepoNotFound")
        if revision in (None, "main", "write", commit_hash(main)):
            return main
        for branch in main.parent.glob(f"{main.name}@*"):
            if revision in (branch.name.partition("@")[2], commit_hash(branch)):
                return branch
        return self.answer_error(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def call_api(self, kind: str, repo: str, action: str, revision: str, below: str | None, data: bytes) -> None:
        """One action on one repository; `below` is the folder of a listing, `data` the body of the request."""
        is_new_branch = action == "branch" and self.command == "POST"
        folder = self.find_branch(kind, repo, None if is_new_branch else revision)
        if folder is None:
            return None
        files = list_files(folder)
        if action in (None, "revision"):
            facts = {"id": repo, "sha": commit_hash(folder), "private": f"{kind}/{repo}" in self.hub.private}
            return self.answer({**facts, "siblings": [*files.values(), *self.hub.extra_tree], "tags": []})
        if action == "tree":
            return self.list_tree(files, f"{below}/" if below else "")

        if not self.authorized or not repo.startswith(f"{USER}/"):
            return self.answer_error(403, "no write permission")
        if action == "preupload":
            return self.choose_upload_modes(json.loads(data)["files"], files)
        if action == "commit":
            return self.commit(folder, [json.loads(line) for line in data.splitlines()])
        if is_new_branch:
            branch = folder.with_name(f"{folder.name}@{revision}")
            if branch.exists():
                return self.answer_error(409, "Reference already exists")
            shutil.copytree(folder, branch)
        elif action == "branch":
            shutil.rmtree(folder)
        elif action == "super-squash":
            used = {content_hash(listed) for listed in list_files(self.hub.root).values()}
            for path in (self.hub.root / ".lfs").iterdir():
                if path.name not in used:
                    path.unlink()
        return self.answer({})

    def create_repo(self, request: dict) -> None:
        """Make the folder of a new repository, if the token may."""
        owner = request.get("organization") or USER
        if not self.authorized or owner != USER:
            return self.answer_error(403 if self.authorized else 401, "You don't have the rights to create it")
        repo = f"{request.get('type', 'model')}s/{owner}/{request['name']}"
        url = f"{self.hub.url}/{repo.removeprefix('models/')}"
        # It exists: with exist_ok, huggingface_hub accepts this answer.
        if (self.hub.root / repo).exists():
            return self.answer({"url": url, "error": "You already created this repo"}, 409)
        (self.hub.root / repo).mkdir(parents=True)
        if request.get("private") or request.get("visibility") == "private":
            self.hub.private.add(repo)
        return self.answer({"url": url, "name": f"{owner}/{request['name']}"})

    def choose_upload_modes(self, requested: list[dict], files: dict[str, dict]) -> None:
        """For each file of a commit to come: how to send it, and the hash of the one that is there."""
        modes = []
        for name in (file["path"] for file in requested):
            mode = "lfs" if Path(name).suffix in LFS_SUFFIXES else "regular"
            existing = content_hash(files[name]) if name in files else None
            modes.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": existing})
        self.answer({"files": modes})

    def offer_uploads(self, objects: list[dict]) -> None:
        """For each LFS object: where to upload it. One that is here is offered without an action, so that it is not
        sent again."""
        for wanted in objects:
            if not (self.hub.root / ".lfs" / wanted["oid"]).is_file():
                wanted["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
        return self.answer({"transfer": "basic", "objects": objects})

    def commit(self, folder: Path, lines: list[dict]) -> None:
        """Add the files of a commit, and remove some: the first line is its header, each other one a file with its
        content (base64) or the hash of an LFS object."""
        for line in lines[1:]:
            value = line["value"]
            target = folder / value["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            if line["key"] == "deletedFile":
                target.unlink()
            elif line["key"] == "lfsFile":
                shutil.copyfile(self.hub.root / ".lfs" / value["oid"], target)
            else:
                target.write_bytes(base64.b64decode(value["content"]))
        commit = commit_hash(folder)
        return self.answer({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/x/y/commit/{commit}"})

    def list_tree(self, files: dict[str, dict], prefix: str) -> None:
        """The folders and files below a folder, or without recursive=true only those directly in it."""
        below = {name: listed for name, listed in files.items() if name.startswith(prefix)}
        if prefix and not below:
            return self.answer_error(404, "Entry not found", "EntryNotFound")
        folders = {parent.as_posix() for name in below for parent in PurePosixPath(name).parents if parent.name}
        entries = [{"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in sorted(folders)]
        listed = [entry for entry in (*entries, *below.values()) if entry["path"].startswith(prefix)]
        if "recursive=true" not in self.path.lower():
            listed = [entry for entry in listed if "/" not in entry["path"].removeprefix(prefix)]
        return self.answer(listed + self.hub.extra_tree)

    def download(self, folder: Path | None, name: str) -> None:
        """A file or a range of its bytes. The hash is in ETag, the commit in X-Repo-Commit."""
        if folder is None:
            return None
        # Looked up in the listing, so that no name leads out of the folder.
        listed = list_files(folder).get(name)
        if listed is None:
            return self.answer_error(404, "Entry not found", "EntryNotFound")
        data = (folder / name).read_bytes()
        headers = {"X_Repo_Commit": commit_hash(folder), "Accept_Ranges": "bytes", "ETag": f'"{content_hash(listed)}"'}

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
