"""A stand-in for the Hugging Face Hub on loopback, with faults on demand, so that tests need no network.

    with hub_server.start(tmp_path / "hub") as hub:         # repos are folders: tmp_path/hub/datasets/OWNER/NAME/...
        hub.faults.append(Fault("000001.npy"))              # the next download of that file has a byte flipped
        run_script("hub.py", "pull-data", "tester/tokens", out, env=hub.env())

It has the part of the Hub's HTTP API that huggingface_hub uses for what this project does: the cases of `find_answer`.
Each repository has one branch, main. A commit is known by a hash of its files; when they change, it is gone.
"""

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

USER = "tester"  # the token's user, who owns the repositories that are named without an owner

# Files that the Hub stores outside of git, as LFS objects; of the others it lists no sha256.
LFS_SUFFIXES = (".npy", ".bin", ".pt", ".parquet", ".safetensors", ".png")


@dataclass
class Fault:
    """What goes wrong when a path contains `path`: each request is answered with `code` or, if that is 0, the next
    download has a byte flipped."""

    path: str
    code: int = 0


@dataclass
class Hub:
    """The state of the stand-in, which tests change and look at while it runs."""

    root: Path
    url: str = ""
    token: str = "hf_testPlantedTokenNeverPrinted"
    faults: list[Fault] = field(default_factory=list)
    private: set[str] = field(default_factory=set)  # "datasets/OWNER/NAME" of each repository that is not public
    log: list[tuple[str, str]] = field(default_factory=list)  # method and path of each request
    extra_tree: list[dict] = field(default_factory=list)  # hostile entries added to every listing

    def env(self) -> dict[str, str]:
        """Environment of a script that is to talk to this Hub and to nothing else."""
        home = str(self.root.parent / "hf-home")
        return {"no_proxy": "127.0.0.1", "HF_ENDPOINT": self.url, "HF_TOKEN": self.token, "HF_HOME": home}

    def connect(self, monkeypatch) -> None:
        """Let huggingface_hub in this process talk to this Hub. It reads its environment at import, which takes
        seconds: set what it has read."""
        from huggingface_hub import constants

        for name, value in self.env().items():
            monkeypatch.setenv(name, value)
        home = self.env()["HF_HOME"]
        values = {
            "ENDPOINT": self.url,
            "HF_HUB_CACHE": home,
            "HF_TOKEN_PATH": f"{home}/token",
            "HUGGINGFACE_CO_URL_TEMPLATE": self.url + "/{repo_id}/resolve/{revision}/{filename}",
        }
        for name, value in values.items():
            monkeypatch.setattr(constants, name, value)

    def add_hostile_file(self, path):
        """Every listing has a file that leads out of the folder."""
        self.extra_tree.append({"type": "file", "path": path, "size": 1, "oid": "0" * 40})

    def take_fault(self, method, path):
        """The fault that hits this request, if any."""
        for fault in self.faults:
            if fault.path in path and fault.code:
                return fault
            if fault.path in path and method == "GET":
                self.faults.remove(fault)
                return fault
        return None


class Refused(Exception):
    """An error that the Hub answers: HTTP status, and the code that huggingface_hub looks at."""


def hash_of(path):
    """The sha256 of a file; of a folder a hash of everything in it, for a branch in the place of its commit's."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return hashlib.sha1(json.dumps(list_files(path)).encode()).hexdigest()


def list_files(branch, below="", pattern="**/*"):
    """The files and folders of a branch as the Hub lists them: a large file by its sha256, a small one by git's."""
    entries = []
    for path in sorted((branch / below).glob(pattern)):
        name = path.relative_to(branch).as_posix()
        entry = {"path": name, "size": path.stat().st_size, "oid": "", "type": "directory"}
        if path.is_file():
            content = path.read_bytes()
            entry |= {"type": "file", "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}
        if path.suffix in LFS_SUFFIXES:
            entry["lfs"] = {"oid": hash_of(path), "size": entry["size"], "pointerSize": 134}
        entries.append(entry)
    return entries


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms

    def log_request(self, *args):
        """Called before the answer is sent, so that a test which sees the answer also sees the log."""
        self.hub.log.append((self.command, self.path))

    def respond(self):
        """Read a request, and send its answer or the fault that is planted for it."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.status, self.answer_headers = 200, {}
        fault = self.hub.take_fault(self.command, self.path)
        try:
            if fault and fault.code:
                raise Refused(fault.code, "")
            answer = self.find_answer(unquote(urlsplit(self.path).path), body)
        except Refused as error:
            self.status, self.answer_headers["X-Error-Code"] = error.args
            answer = {}

        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(self.status)
        for name, value in {**self.answer_headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()

        if fault and not fault.code:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_PUT = respond

    def find_answer(self, path, body):
        """The content of a file, or what to send as JSON."""
        stored = self.hub.root / ".lfs"
        parts = path.removeprefix("/").removeprefix("api/").split("/")
        match parts:
            case ["validate-yaml"]:
                return {"errors": [], "warnings": []}
            case ["lfs", sha256]:
                (stored / sha256).write_bytes(body)
                return {}
            case [*_, "lfs", "objects", "batch"]:
                objects = json.loads(body)["objects"]
                for wanted in objects:
                    wanted["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
                return {"objects": objects}
            case ["repos", "create"]:
                new = json.loads(body)
                parts = [new["type"] + "s", new["organization"] or USER, new["name"], "create", new["visibility"]]
        if parts[0] not in ("datasets", "models"):  # the address of a download of a model has no prefix
            parts = ["models", *parts]
        kind, owner, name, *action = parts

        repo = f"{kind}/{owner}/{name}"
        main = self.hub.root / repo
        exists = main.is_dir()
        if not exists and action[:1] != ["create"]:
            raise Refused(404, "RepoNotFound")
        is_write = self.command == "POST" or action == ["auth-check", "write"]
        if is_write and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            raise Refused(403, "")

        match [self.command, *action]:
            case [_, "create", visibility]:
                main.mkdir(parents=True, exist_ok=True)
                if exists:
                    self.status = 409
                elif visibility == "private":
                    self.hub.private.add(repo)
            case [_] | [_, "revision", _]:
                return {"id": f"{owner}/{name}", "sha": hash_of(main), "private": repo in self.hub.private}
            case [_, "tree", _, *below]:
                pattern = "**/*" if "recursive=true" in self.path.lower() else "*"
                return list_files(main, "/".join(below), pattern) + self.hub.extra_tree
            case [_, "resolve", _, *names]:
                file = main.joinpath(*names)
                if not file.is_file():
                    raise Refused(404, "EntryNotFound")
                self.answer_headers = {"X-Repo-Commit": hash_of(main), "ETag": f'"{hash_of(file)}"'}
                return file.read_bytes()
            case [_, "preupload", _]:
                names = [file["path"] for file in json.loads(body)["files"]]
                return {"files": [{"path": name, "uploadMode": "lfs", "shouldIgnore": False} for name in names]}
            case [_, "commit", _]:
                for change in [json.loads(line) for line in body.splitlines()[1:]]:  # the first line is the message
                    shutil.copyfile(stored / change["value"]["oid"], main / change["value"]["path"])
                return {"commitOid": hash_of(main), "commitUrl": f"{self.hub.url}/{owner}/{name}/commit/x"}
        # To create and auth-check.
        return {"url": f"{self.hub.url}/{repo.removeprefix('models/')}"}


@contextmanager
def start(root: Path) -> Iterator[Hub]:
    """Serve the repos under `root` on a free port of 127.0.0.1 until the block ends; yields the Hub."""
    hub = Hub(root)
    (root / ".lfs").mkdir(parents=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
