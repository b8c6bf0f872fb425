"""Checkpoints: atomic, asynchronous, complete or absent, and loaded without unpickling anything but tensors.

    OUT/model_{step:05d}.pt   weights in float32 and the model's config: what you copy to a laptop
    OUT/optim_{step:05d}.pt   optimizers, step, random states, the run's config: what else resuming needs

A step is complete when both files are whole. Each is written under a temporary name, synced to disk, then renamed.
"""

import pickletools
import re
import threading
import zipfile
from collections.abc import Container, Iterable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from pickle import PickleError
from typing import Any

import torch

from cli import WRITER, UserError, print0
from files import whole_file
from model import GPT, GPTConfig

NAME = re.compile(r"(model|optim)_([0-9]{5}|[1-9][0-9]{5,17})\.pt")
FORMAT = 1
# The only globals that tensors and plain containers need; weights_only allows more, e.g. bytearrays of any length.
PLAIN = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch (\w+Storage|[a-z]+[0-9]+|Size|device)"
)


def is_whole(path: Path) -> bool:
    """Whether a .pt file ends in a zip directory, which torch.save writes last and is only valid with the rest."""
    try:
        with zipfile.ZipFile(path) as z:
            return bool(z.infolist())
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):  # the last: a future zip version
        return False


def complete_steps(out_dir: str | Path, needed: Iterable[str] = ("model", "optim")) -> list[int]:
    """Steps of the run folder whose `needed` files are whole, sorted."""
    found: dict[int, set[str]] = {}
    for path in Path(out_dir).glob("*.pt"):
        if (m := NAME.fullmatch(path.name)) and is_whole(path):
            found.setdefault(int(m[2]), set()).add(m[1])
    return sorted(step for step, kinds in found.items() if kinds.issuperset(needed))


def latest_step(out_dir: str | Path) -> int | None:
    """Newest complete step of a run folder, or None."""
    return max(complete_steps(out_dir), default=None)


def model_path(out_dir: str | Path, step: int) -> Path:
    return Path(out_dir) / f"model_{step:05d}.pt"


def missing(path: Path) -> UserError:
    """The error for a missing checkpoint; it lists those that exist."""
    here = ", ".join(sorted(p.name for p in path.parent.glob("model_*.pt"))) or "none"
    return UserError(f"no checkpoint {path}; {path.parent} has {here} (train: python train_gpt2.py)")


def pickled_names(path: Path) -> set[str]:
    """Every "module name" that the pickles in a torch.save file would look up. Raises ValueError, among others, for a
    zip that unpacks to more than its own size: torch.save does not compress."""
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as f:  # the format before torch 1.6: five pickles, then the numbers
            ops = [op for _ in range(5) for op in pickletools.genops(f)]
    else:
        with zipfile.ZipFile(path) as z:
            if sum(i.file_size for i in z.infolist()) > path.stat().st_size:
                raise ValueError("it is compressed")
            ops = [op for i in z.infolist() if i.filename.endswith(".pkl") for op in pickletools.genops(z.read(i))]
    return {str(name) for op, name, _ in ops if op.name in ("GLOBAL", "STACK_GLOBAL", "INST")}


def read_tensors(path: Path, inert: Container[str] = ()) -> Any:
    """The tensors and plain containers that torch.save wrote, on the CPU. No pickled code runs, and no size stated in
    the file is trusted: raises PickleError for names other than those tensors need (and `inert` ones, which the caller
    has made harmless with torch.serialization.safe_globals), ValueError and torch's own errors for the rest."""
    if odd := sorted(name for name in pickled_names(path) if not PLAIN.fullmatch(name) and name not in inert):
        raise PickleError(f"it refers to {odd[0].replace(' ', '.')}, which could run code")
    found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    # a tensor may repeat its data without end (stride 0), and a copy of it would take that much memory
    todo, seen = [found], {}
    while todo:
        x = todo.pop()
        if id(x) not in seen:
            seen[id(x)] = x
            if isinstance(x, dict):
                todo += [*x, *x.values()]
            elif isinstance(x, list | tuple):
                todo += x
    size = sum(x.numel() * x.element_size() for x in seen.values() if isinstance(x, torch.Tensor))
    if size > 2 * path.stat().st_size:  # 2: a tied head may appear under both its names
        raise ValueError(f"its tensors total {size:,} bytes")
    return found


def _load(path: Path) -> dict[str, Any]:
    """read_tensors for our own files. Raises UserError for a file that is missing, damaged or not ours."""
    if not path.is_file():
        raise missing(path)
    try:
        with zipfile.ZipFile(path) as z:
            bad = z.testzip()  # the CRC-32 of every record, which torch.load does not check
    except Exception as e:  # zipfile raises many exception types, too
        bad = f"its directory ({type(e).__name__})"
    if bad:
        named = NAME.fullmatch(path.name)
        earlier = f"; move *_{named[2]}.pt away, and --resume auto uses the previous one" if named else ""
        raise UserError(f"checkpoint {path} ({path.stat().st_size:,} bytes) is damaged or truncated: {bad}{earlier}")
    convert = f"convert build-nanogpt and nanoGPT files with: python hub.py import {path} OUT_DIR"
    try:
        found = read_tensors(path)
    except PickleError:
        raise UserError(f"{path} holds pickled objects, which are never run; {convert}") from None
    except Exception as e:  # torch raises many exception types for a file that is not what it seems
        raise UserError(f"cannot read checkpoint {path} ({type(e).__name__}); use an earlier one") from None
    if not isinstance(found, dict) or type(found.get("format")) is not int or found["format"] != FORMAT:
        raise UserError(f"{path} is not a checkpoint of this project; {convert}")
    return found


def load_weights(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(state dict on the CPU, the file's other entries: config, step, val_loss, preset) of a .pt file or run folder."""
    path = Path(path)
    if path.is_dir():
        # a folder pulled from a Hub may have no optimizer: a model alone will do for inference
        steps = complete_steps(path) or complete_steps(path, ["model"])
        if not steps:
            runs = ", ".join(sorted({str(p.parent) for p in path.glob("*/model_*.pt")}))
            mend = f"use one of {runs}" if runs else "train one: python train_gpt2.py --help"
            raise UserError(f"{path} holds no complete checkpoint (model_*.pt); {mend}")
        path = model_path(path, steps[-1])
    found = _load(path)
    if not all(isinstance(found.get(key), kind) for key, kind in {"model": dict, "config": dict, "step": int}.items()):
        raise UserError(f"{path} contains no model; use the model_*.pt file")
    return found.pop("model"), found


def load(path: str | Path) -> tuple[GPT, dict[str, Any]]:
    """The GPT (CPU, eval mode) in a .pt file or in the newest complete step of a run folder, and the file's other
    entries. Raises UserError."""
    state, rest = load_weights(path)
    try:
        return GPT.from_state_dict(GPTConfig.from_dict(rest["config"]), state).eval(), rest
    except (RuntimeError, TypeError, ValueError, AttributeError, ZeroDivisionError) as e:
        why = " ".join(str(e).split())[:300]
        mend = "use an earlier one, or the model.py it was made with"
        raise UserError(f"{path}: its weights do not fit its config here ({why}); {mend}") from None


def load_model(path: str | Path, device: str | torch.device = "cpu") -> GPT:
    """The GPT of `load`, on `device`."""
    return load(path)[0].to(device)


def read_train_state(path: str | Path) -> dict[str, Any]:
    """The contents of optim_*.pt and its `model_file`, given either file or a run folder (its newest complete step)."""
    path = Path(path)
    if path.is_dir():
        step = latest_step(path)
        if step is None:
            raise UserError(f"{path} holds no complete checkpoint to resume from (model_*.pt with optim_*.pt)")
        path = model_path(path, step)
    if not path.is_file():
        raise missing(path)
    mend = f"to start a new run from its weights, use --init-from {path}"
    if not NAME.fullmatch(path.name):
        raise UserError(f"cannot resume from {path}: checkpoints are named like model_00500.pt; {mend}")
    optim = path.with_name(path.name.replace("model_", "optim_"))
    if not optim.is_file():
        raise UserError(f"{path} has no {optim.name} next to it, so the run cannot resume exactly; {mend}")
    return _load(optim) | {"model_file": optim.with_name(optim.name.replace("optim_", "model_"))}


def to_host(tree: Any, memo: dict) -> Any:
    """A copy of nested containers with every tensor in host memory; tensors that share storage are copied once."""
    if isinstance(tree, torch.Tensor):
        key = (tree.data_ptr(), tree.shape, tree.dtype, str(tree.device))
        if key not in memo:
            memo[key] = tree.detach().to("cpu", copy=True)
        return memo[key]
    if isinstance(tree, dict):
        return {k: to_host(v, memo) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [to_host(v, memo) for v in tree]
    return tree


def model_file(model: GPT, step: int, **extra: Any) -> dict[str, Any]:
    """The contents of model_*.pt: the weights under their own names, the model's config, the step."""
    return {"format": FORMAT, "model": dict(model.state_dict()), "config": asdict(model.config), "step": step, **extra}


def write(path: Path, content: dict[str, Any]) -> None:
    """torch.save, whole or not at all. Raises OSError if the disk is full."""
    try:
        with whole_file(path) as f:
            torch.save(content, f)
    except RuntimeError as e:  # torch's zip writer hides the file's error behind one about an unexpected position
        if isinstance(e.__context__, OSError):
            raise e.__context__ from None
        raise


class Writer:
    """Writes checkpoints in a thread while training continues; keeps the newest `keep` (0: all) and the best.

    A failed write is reported at once, and training continues: the next save tries again. If the last one failed,
    `wait` raises UserError. Earlier checkpoints stay.
    """

    def __init__(self, out_dir: str | Path, keep: int = 0):
        self.out_dir, self.keep = Path(out_dir), keep
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._error: Exception | None = None  # set by the thread

    def save(self, step: int, model: dict[str, Any], train: dict[str, Any], best_step: int | None = None) -> None:
        """Start copying both to host memory and writing the copies. Neither may change until `copied` returns."""
        if self._thread is not None:
            self._thread.join()
        self._copied.clear()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what was just gathered for it has arrived
        train = {"format": FORMAT, **train}
        self._thread = threading.Thread(target=self._write, args=(step, model, train, best_step), name=WRITER)
        self._thread.start()
        if next(iter(model["model"].values())).device.type == "mps":  # not for two threads at once (pytorch#197805)
            self._copied.wait()

    def copied(self) -> None:
        """Wait until the arguments of `save` may change again."""
        if self._thread is not None:
            self._copied.wait()

    def wait(self) -> None:
        """Wait for the write in progress, if any; raise UserError if it failed."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            mend = f"free space or choose another --out-dir. Newest complete step there: {latest_step(self.out_dir)}"
            raise UserError(f"could not write the checkpoint in {self.out_dir}: {self._error}; {mend}")

    def _write(self, step: int, model: dict, train: dict, best_step: int | None) -> None:
        try:
            device = next(iter(model["model"].values())).device
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a new thread starts on cuda:0, which may not be ours
            # a stream of its own lets the copy on a GPU overlap the next forward and backward
            with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
                model, train = to_host([model, train], {})
            self._copied.set()
            if bad := [name for name, weight in model["model"].items() if not weight.isfinite().all()]:
                raise UserError(f"the weights are not finite ({bad[0]}); lower --max-lr")
            for left in self.out_dir.glob(".*.pt.part"):  # left by a run killed while writing
                left.unlink()
            path = model_path(self.out_dir, step)
            write(path.with_name(f"optim_{step:05d}.pt"), train)
            write(path, model)  # last: infer.py and --resume auto look for it
            self._retain(step, best_step)
            self._error = None
        except Exception as e:
            self._error = e
            print0(f"warning: could not write the checkpoint of step {step} ({e}); the next save tries again")
        finally:
            self._copied.set()

    def _retain(self, step: int, best_step: int | None) -> None:
        """Delete this run's older checkpoints beyond `keep`, but never the best or an incomplete one."""
        if self.keep:
            steps = [s for s in complete_steps(self.out_dir) if s <= step]
            for old in set(steps[: -self.keep]) - {best_step}:
                model_path(self.out_dir, old).unlink()
                (self.out_dir / f"optim_{old:05d}.pt").unlink()
