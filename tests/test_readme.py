"""Every command that README.md tells people to type is run here, at a tiny size, in a folder that has what a user would
have by then; those that need another machine are only looked at."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import hub_server
import pytest
import test_hellaswag
from conftest import ROOT
from test_fineweb import parquet, story
from test_hub import make_shards

TEXT = (ROOT / "README.md").read_text()
SHELL = (
    "python|torchrun|make|bash|docker|sbatch|sky|runpodctl|tail|git|export|[A-Z_]+=\\S+ .*\\./train\\.sh|\\./train\\.sh"
)
TINY = """--model.n-layer 2 --model.n-head 2 --model.n-embd 16 --model.block-size 64 --model.vocab-size 50304
--sequence-length 32 --total-batch-size 64 --micro-batch-size 2 --val-tokens 64 --sample-every 0 --no-compile
--dtype float32 --device cpu""".split()
# what cannot run here, and why; the files that these commands name must exist all the same
ELSEWHERE = {
    "git": "needs the project's address",
    "docker": "no container runtime",
    "sbatch": "no Slurm; tests/test_clouds.py runs the script",
    "sky": "no cloud; tests/test_clouds.py runs the file",
    "runpodctl": "no pod",
    "tail": "ends by hand; tests/test_life.py follows a run",
    "export": "part of the next command",
}
PEERS = re.compile(r" (sample|train)\.py|config/")  # nanoGPT's own, in the table of those who come from there


def commands() -> list[str]:
    """The commands of the indented blocks and of the inline code, in order, each once."""
    blocks = "\n".join(re.findall(r"^    (.*)", TEXT, re.M)).replace("\\\n", " ")
    inline = "\n".join(" ".join(code.split()) for code in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", TEXT))
    found = []
    for line in f"{blocks}\n{inline}".splitlines():
        if re.match(f"({SHELL}) ", line):
            parts = re.split(r" && ", re.sub(r"\s+#.*", "", line))
            found += [p.strip() for p in parts if re.match(f"({SHELL}) ", p + " ") and not PEERS.search(p)]
    return list(dict.fromkeys(found))


COMMANDS = commands()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A project folder after a while: data, two finished runs, an old checkpoint, own text; and a Hub that knows us."""
    base = tmp_path_factory.mktemp("readme")
    project = base / "project"
    (project / "data").mkdir(parents=True)
    for name in [
        *[p.name for p in ROOT.glob("*.py")],
        "Makefile",
        "requirements.txt",
        "requirements-dev.txt",
        "train.sh",
    ]:
        shutil.copy(ROOT / name, project)
    shards = make_shards(project / "data" / "fineweb-edu")
    for name in ("fineweb", "stdlib", "my"):
        shutil.copytree(shards, project / "data" / name)
    (project / "data" / "hellaswag").mkdir()
    test_hellaswag.write(project / "data" / "hellaswag" / "hellaswag_val.jsonl", test_hellaswag.make_rows(2))
    (project / "my").mkdir()
    (project / "my" / "a.txt").write_text("To be, or not to be. " * 2000)
    (project / "old").mkdir()
    with hub_server.start(base / "hub") as server:
        here = SimpleNamespace(root=project, hub=server, env={**os.environ, **server.env(), "OMP_NUM_THREADS": "2"})
        for preset, steps in (("gpt2-124m", "--steps-per-epoch"), ("speedrun-124m", "--max-steps")):
            python(here, f"train_gpt2.py {preset} {shlex.join(TINY)} {steps} 2")
        import torch

        import checkpoint

        shutil.copytree(project / "log" / "gpt2-124m", project / "log" / "quickstart")
        model = checkpoint.load_model(project / "log" / "gpt2-124m")
        old = {"model": model.state_dict(), "model_args": {"n_head": 2}, "iter_num": 19072}  # as nanoGPT writes it
        torch.save(old, project / "old" / "model_19072.pt")
        shutil.copytree(shards, server.root / "datasets" / "tester" / "NAME")
        shutil.copytree(project / "log" / "gpt2-124m", server.root / "models" / "tester" / "NAME")
        server.private |= {"datasets/tester/NAME", "models/tester/NAME"}
        for name in ("fineweb-edu", "fineweb"):
            repo = server.root / "datasets" / "HuggingFaceFW" / name
            parquet(repo / "sample" / "10BT" / "000.parquet", story(1, 60))
        yield here


def python(here, line, cwd=None):
    """Run one of our scripts in this process, as `python SCRIPT ...` would; what needs the Hub in one of its own."""
    script, *args = shlex.split(line)
    cwd = cwd or here.root
    if script in ("hub.py", "fineweb.py") or any("hf://" in a for a in args):
        command = [sys.executable, str(ROOT / script), *args]
        done = subprocess.run(command, cwd=cwd, env=here.env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return
    before, argv = os.getcwd(), sys.argv
    os.chdir(cwd)
    sys.argv = [script, *args]
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as e:
        assert not e.code, f"{line} ended with {e.code}"
    finally:
        os.chdir(before)
        sys.argv = argv


def tiny(words):
    """The words of a training command, made small and given a new run folder where it would start a run."""
    if "--help" in words:
        return words
    size = [*TINY, *(["--steps-per-epoch", "2", "--epochs", "2"] if "--resume" in words else ["--max-steps", "2"])]
    words = ["log/gpt2-124m" if w == "gpt2" else w for w in words]  # for OpenAI's weights, which are not here
    size += ["--init-from", "log/gpt2-124m"] if "finetune" in words and "--init-from" not in words else []
    fresh = [] if {"--resume", "--dry-run"} & set(words) else ["--out-dir", "log/new"]
    return [*words, *size, *fresh]


def as_here(command):
    """The command as it is run here: scripts with their arguments, or an empty list where it is for another machine."""
    stand_ins = {
        "OWNER/NAME": "tester/NAME",
        "kjj0/fineweb10B-gpt2 data/fineweb": "tester/NAME data/pulled",
        "model_19073": "model_00002",
        " /shared/": " ",
        " /lambda/nfs/": " ",
        " 25000": " 4",
    }
    for there, here in stand_ins.items():
        command = command.replace(there, here)
    words = shlex.split(command)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, words = words[0].split("=")[0], words[1:]
        assert name in (ROOT / "train.sh").read_text(), f"{name} is no setting of train.sh"
    if words[0] in ELSEWHERE:
        for word in words:
            assert not re.fullmatch(r"[\w-]+\.(yaml|sbatch|py)", word) or (ROOT / word).is_file(), word
        return []
    if words[0] == "make":
        return [["make", *words[1:]]]
    if words[0] == "./train.sh":
        args = words[1:]
        if args[0].endswith(".pt"):
            args = ["--resume", args[0], "--epochs", args[1], *args[2:]]
        elif args[0] == "--help":
            return [["bash", "train.sh", "--help"]]
        return [["train_gpt2.py", *tiny(args)]]
    at = next(i for i, w in enumerate(words) if w.endswith(".py"))
    script, args = words[at], words[at + 1 :]
    if script == "train_gpt2.py":
        args = tiny(args)
    elif script == "fineweb.py" and "--verify" not in args:
        args += ["--out", "data/new", "--limit-tokens", "5000"]
    elif script == "infer.py":
        args += ["--max-new-tokens", "2"]
    return [[script, *args]]


def test_there_are_commands_of_every_kind():
    assert len(COMMANDS) > 35
    for kind in ("make", "python", "torchrun", "./train.sh", "PUSH_TO"):
        assert any(c.startswith(kind) for c in COMMANDS), kind
    for script in "train_gpt2 infer fineweb hub plots hellaswag".split():
        assert any(f"{script}.py" in c for c in COMMANDS), script


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command, world, tmp_path):
    folder = tmp_path / "project"  # a copy for each: no command needs what another one left
    shutil.copytree(world.root, folder)
    for line in as_here(command):
        if line[0] == "make" and line[1] == "quickstart":
            (folder / ".venv").mkdir()
            (folder / ".venv" / ".installed").touch()
            asked = subprocess.run(["make", "-n", "quickstart"], cwd=folder, capture_output=True, text=True, check=True)
            steps = re.findall(r"^\.venv/bin/(python .*)", asked.stdout, re.M)
            assert len(steps) == 4
            shutil.rmtree(folder / "log")
            for step in steps:
                ((script, *args),) = as_here(step)
                args = [a.replace("log/new", "log/quickstart") for a in args]
                args += ["--max-steps", "2"] * (script == "train_gpt2.py")
                python(world, shlex.join([script, *args]), folder)
            assert (folder / "log" / "quickstart" / "curves.png").is_file()
        elif line[0] in ("make", "bash"):
            dry = ["-n"] if line[0] == "make" else []
            subprocess.run([line[0], *dry, *line[1:]], cwd=folder, capture_output=True, check=True)
        else:
            python(world, shlex.join(line), folder)


def test_every_file_is_in_the_table():
    for path in ROOT.glob("*.py"):
        assert f"`{path.name}`" in TEXT, path.name
    for name in re.findall(r"`([\w/-]+\.(?:py|sh|md|ipynb|yaml|sbatch))`", TEXT):
        assert (ROOT / name).is_file() or name in ("sample.py", "train.py"), name
