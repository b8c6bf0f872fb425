"""Every command that README.md and docs/ tell people to type: one of each way through a script is run, at a tiny size,
in a folder that has what a user would have by then; the script's own parser reads the others. Those that need another
machine are only looked at."""

import functools
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from types import SimpleNamespace

import processes
import pytest
import torch
import tyro
from faults import hub_server
from helpers import ROOT, make_documents, make_hellaswag_rows, make_shards, write_jsonl, write_parquet

from model import GPT
from training import optim
from training.config import TrainConfig
from training.open_model import open_model
from training.presets import PRESETS, parse

README = (ROOT / "README.md").read_text()
PAGES = {"README.md": README, **{f"docs/{p.name}": p.read_text() for p in sorted((ROOT / "docs").glob("*.md"))}}
TINY = """--model.n-layer 2 --model.n-head 2 --model.n-embd 16 --model.block-size 64 --model.vocab-size 50304
--sequence-length 32 --total-batch-size 64 --micro-batch-size 2 --val-tokens 64 --sample-every 0 --no-compile
--dtype float32 --device cpu""".split()
# what cannot run here, and why; the files that these commands name must exist all the same
ELSEWHERE = {
    "git": "needs the project's address",
    "docker": "no container runtime",
    "runpodctl": "no pod",
    "tail": "ends by hand; tests/test_life.py follows a run",
    "export": "part of the next command",
    "cd": "part of the next command",
    "ssh": "no other machine",
    "ssh-keygen": "leaves a key",
    "scp": "no other machine",
    "rsync": "no other machine",
    "cp": "no Drive",
    "sed": "part of the next command",
    "pip": "no network; requirements.txt is what make installs",
    "conda": "not installed",
    "curl": "no network",
    "touch": "part of the command before",
}
SCRIPTS = r"python|torchrun|make|\./train\.sh|\.venv/bin/python"
SHELL = re.compile(rf"!?(?:[A-Z_]+=\S+ )*(?:{SCRIPTS}|sbatch|{'|'.join(ELSEWHERE)}) ")
# settings of the libraries underneath, beside those of train.sh
VARIABLES = "CUDA_DEVICE_ORDER CUDA_VISIBLE_DEVICES HF_HOME HF_TOKEN LAMBDA_API_KEY NCCL_DEBUG".split()
# what sends a command another way through its script; other words only change values
WAYS = re.compile(
    r"--(?:dry-run|resume|init-from|eval-only|tracker|help|source|verify|tensorboard|model|overfit-single-batch)\b|hf://"
)
PEERS = re.compile(r" (sample|train)\.py|config/")  # nanoGPT's own, in the table of those who come from there


def commands(text: str) -> list[str]:
    """The commands of the indented blocks and of the inline code, in order, each once."""
    blocks = "\n".join(re.findall(r"^    +(.*)", text, re.M)).replace("\\\n", " ")
    inline = "\n".join(" ".join(code.split()) for code in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", text))
    found = []
    for line in f"{blocks}\n{inline}".splitlines():
        if SHELL.match(line):
            parts = re.split(r" && ", re.sub(r"\s+#.*", "", line).removeprefix("!"))
            found += [p.strip() for p in parts if SHELL.match(p + " ") and not PEERS.search(p)]
    return list(dict.fromkeys(found))


COMMANDS = list(dict.fromkeys(command for text in PAGES.values() for command in commands(text)))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A project folder after a while: data, two finished runs, an old checkpoint, own text; and a Hub that knows us."""
    base = tmp_path_factory.mktemp("readme")
    project = base / "project"
    (project / "data").mkdir(parents=True)
    (project / "tests").mkdir()
    for name in ("Makefile", "requirements.txt", "constraints.txt", "tests/requirements.txt", "train.sh"):
        shutil.copy(ROOT / name, project / name)
    shards = make_shards(project / "data" / "fineweb-edu")
    for name in ("fineweb", "stdlib", "my"):
        shutil.copytree(shards, project / "data" / name)
    shutil.copytree(shards, project / "edu_fineweb10B", ignore=shutil.ignore_patterns("manifest.json"))
    (project / "data" / "hellaswag").mkdir()
    write_jsonl(project / "data" / "hellaswag" / "hellaswag_val.jsonl", make_hellaswag_rows(2))
    (project / "my").mkdir()
    (project / "my" / "a.txt").write_text("To be, or not to be. " * 2000)
    (project / "old").mkdir()
    with hub_server.start(base / "hub") as server:
        here = SimpleNamespace(root=project, hub=server, env={**server.env(), "OMP_NUM_THREADS": "2"})
        for preset, steps in (("gpt2-124m", "--steps-per-epoch"), ("speedrun-124m", "--max-steps")):
            python(here, f"train_gpt2.py {preset} {shlex.join(TINY)} {steps} 2")
        shutil.copytree(project / "log" / "gpt2-124m", project / "log" / "quickstart")
        model = open_model(project / "log" / "gpt2-124m")
        old = {"model": model.state_dict(), "model_args": {"n_head": 2}, "iter_num": 19072}  # as nanoGPT writes it
        torch.save(old, project / "old" / "model_19072.pt")
        shutil.copytree(shards, server.root / "datasets" / "tester" / "NAME")
        shutil.copytree(project / "log" / "gpt2-124m", server.root / "models" / "tester" / "NAME")
        server.private |= {"datasets/tester/NAME", "models/tester/NAME"}
        for name in ("fineweb-edu", "fineweb"):
            repo = server.root / "datasets" / "HuggingFaceFW" / name
            write_parquet(repo / "sample" / "10BT" / "000.parquet", make_documents(1, 60))
        yield here


def python(here, line, cwd=None):
    """Run one of our scripts in this process, as `python SCRIPT ...` would; what needs the Hub in one of its own, whose
    library reads the Hub's address when it is imported."""
    script, *args = shlex.split(line)
    cwd = cwd or here.root
    if re.search(r"hub\.py (push|pull|check)|hf://", line) or (
        script == "fineweb.py" and not re.search("--verify|stdlib|my/", line)
    ):
        processes.start(script, *args, log=cwd / "said", cwd=cwd, env=here.env).wait_for_success()
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", [script, *args])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as e:
            assert not e.code, f"{line} ended with {e.code}"


class Parsed(Exception):
    """The arguments of a script were understood."""


def only_parse(cli):
    """A tyro function that does nothing once it has read the arguments."""

    def idle(function):
        return functools.wraps(function)(lambda *_, **__: None)

    def read(what, *args, **kwargs):
        if isinstance(what, dict):
            what = {name: idle(function) for name, function in what.items()}
        elif not isinstance(what, type):
            what = idle(what)
        cli(what, *args, **kwargs)
        raise Parsed

    return read


def understood(script, *args):
    """Whether the script's own parser takes these arguments; nothing is run."""
    if script == "train_gpt2.py":
        return parse(list(args), lambda path: TrainConfig().to_dict())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(tyro, "cli", only_parse(tyro.cli))
        patch.setattr(tyro.extras, "subcommand_cli_from_dict", only_parse(tyro.extras.subcommand_cli_from_dict))
        patch.setattr(sys, "argv", [script, *args])
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return True


def tiny(words):
    """The words of a training command, made small and given a new run folder where it would start a run."""
    if "--help" in words or "--card" in words:  # a prediction is as fast at full size
        return words
    size = [*TINY, *(["--steps-per-epoch", "2", "--epochs", "2"] if "--resume" in words else ["--max-steps", "2"])]
    # the same network for OpenAI's weights and for imported ones, which are not here
    words = ["log/gpt2-124m" if w in ("gpt2", "log/old") else w for w in words]
    size += ["--init-from", "log/gpt2-124m"] if "finetune" in words and "--init-from" not in words else []
    fresh = [] if {"--resume", "--dry-run"} & set(words) else ["--out-dir", "log/new"]
    return [*words, *size, *fresh]


def as_here(command):
    """The command as it is run here: a script with its arguments, or an empty list where it is for another machine."""
    stand_ins = {
        "OWNER/NAME": "tester/NAME",
        "kjj0/fineweb10B-gpt2 data/fineweb": "tester/NAME data/pulled",
        "log/llmc-124m": "log/gpt2-124m",
        "model_19073": "model_00002",
        " /shared/": " ",
        " 25000": " 4",
    }
    for there, here in stand_ins.items():
        command = command.replace(there, here)
    words = shlex.split(command)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, words = words[0].split("=")[0], words[1:]
        assert name in VARIABLES or name in (ROOT / "train.sh").read_text(), f"{name} is no setting of train.sh"
    if words[0] == "sbatch":  # no Slurm, but tests/test_clouds.py runs the script: what follows goes to the trainer
        words = ["train_gpt2.py", *words[words.index("cloud/slurm.sbatch") + 1 :]]
    if words[0] in ELSEWHERE or words[1:3] == ["-m", "pip"]:
        for word in words:
            assert not re.fullmatch(r"[\w/-]+\.(yaml|sbatch|py)|.*Dockerfile", word) or (ROOT / word).is_file(), word
        return []
    if words[0] == "make" or words == ["./train.sh", "--help"]:
        return words
    if words[0] == "./train.sh":
        script, args = "train_gpt2.py", words[1:]
        if args[0].endswith(".pt"):
            args = ["--resume", args[0], "--epochs", args[1], *args[2:]]
    else:
        at = next(i for i, w in enumerate(words) if w.endswith(".py"))
        script, args = words[at], words[at + 1 :]
    if script == "train_gpt2.py":
        args = tiny(args)
    elif script == "fineweb.py" and "--verify" not in args:
        args += ["--out", "data/new", "--limit-tokens", "5000"]
    elif script == "infer.py":
        args += ["--max-new-tokens", "2"]
    return [script, *args]


def split():
    """The commands to run, the first of each way through a script, and those to parse only."""
    ways, run, others = set(), [], []
    for command in COMMANDS:
        line = as_here(command)
        if not line:
            continue
        subject = line[1:2] if line[0] in ("train_gpt2.py", "hub.py") else []  # the preset, or what to do
        way = (line[0], *subject, *sorted(set(WAYS.findall(shlex.join(line)))))
        if line[0].startswith("tests/") or (line[0].endswith(".py") and way in ways):
            others.append(command)
        else:
            run.append(command)
        ways.add(way)
    return run, others


RUN, PARSED = split()


def test_there_are_commands_of_every_kind():
    assert len(COMMANDS) > 80
    for kind in ("make", "python", "torchrun", "./train.sh", "PUSH_TO", "CUDA_VISIBLE_DEVICES", "sbatch", "scp"):
        assert any(c.startswith(kind) for c in COMMANDS), kind
    for script in "train_gpt2 infer fineweb hub plots hellaswag".split():
        assert any(f"{script}.py" in c for c in COMMANDS), script


@pytest.mark.parametrize("command", RUN)
def test_command_runs(command, world, tmp_path):
    folder = tmp_path / "project"  # a copy for each: no command needs what another one left
    shutil.copytree(world.root, folder)
    line = as_here(command)
    if line == ["make", "quickstart"]:
        (folder / ".venv").mkdir()
        (folder / ".venv" / ".installed").touch()
        asked = subprocess.run(["make", "-n", "quickstart"], cwd=folder, capture_output=True, text=True, check=True)
        steps = re.findall(r"^\.venv/bin/(python .*)", asked.stdout, re.M)
        assert len(steps) == 4
        shutil.rmtree(folder / "log")
        for step in steps:
            python(world, shlex.join(as_here(step)).replace("log/new", "log/quickstart"), folder)
        assert (folder / "log" / "quickstart" / "curves.png").is_file()
    elif line[0] == "make":
        subprocess.run(["make", "-n", *line[1:]], cwd=folder, capture_output=True, check=True)
    elif line[0] == "./train.sh":
        subprocess.run(line, cwd=folder, capture_output=True, check=True)
    else:
        python(world, shlex.join(line), folder)


@pytest.mark.parametrize("command", PARSED)
def test_command_is_understood(command):
    assert understood(*as_here(command))


def test_readme_shows_every_file():
    """The scripts by name, and in the row of each wing the names of its files."""
    for path in ROOT.glob("*.py"):
        assert f"`{path.name}`" in README, path.name
    for wing in [path.parent.name for path in ROOT.glob("*/__init__.py")]:
        row = re.search(rf"^\| `{wing}/` \| (.*)", README, re.M)[1]
        for path in (ROOT / wing).glob("[!_]*.py"):
            assert re.search(rf"\b{path.stem}\b", row), path
    assert len(README) < 8300, "README is one screen and one page: move what only some readers need to docs/"


def heading_links(text):
    """What GitHub makes of the headings of a page."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)", text, re.M)}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_points_to_is_there(page):
    text, folder = PAGES[page], (ROOT / page).parent
    for name in re.findall(r"`([\w/-]+\.(?:py|sh|md|ipynb|yaml|sbatch|csv))`", text):
        theirs = ("sample.py", "train.py", "tiny_shakespeare.py", "fineweb-edu.py", "cached_fineweb10B.py", "run.sh")
        there = (ROOT / name).is_file() or (ROOT / "tests" / name).is_file()
        assert there or name in theirs, name
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if target.startswith("http"):
            continue
        path = (folder / target).resolve() if target else ROOT / page
        assert path.is_file(), target
        assert not anchor or anchor in heading_links(path.read_text()), f"{target}#{anchor}"


def test_the_sizes_of_checkpoints_are_what_the_presets_come_to():
    """The table of docs/clouds.md: 4 bytes a parameter for weights, 8 for AdamW, 4 for a matrix of Muon's."""
    rows = re.findall(
        r"^\| `([\w-]+)` \| ([\d,]+) \| ([\d.]+) GB \| (\d+) \| ([\d.]+) GB \|", PAGES["docs/clouds.md"], re.M
    )
    assert len(rows) == 9
    for name, parameters, step, kept, total in rows:
        cfg = PRESETS[name]
        with torch.device("meta"):
            model = GPT(cfg.model)
        muon = sum(
            p.numel()
            for g in optim.parameter_groups(dict(model.named_parameters()), cfg).get("muon", [])
            for p in g["params"]
        )
        size = (12 * model.num_params() - 4 * muon) / 1e9
        steps = cfg.total_steps(10_000_000_000 // cfg.sequence_length)
        saves = -(-steps // cfg.save_every)
        assert (f"{model.num_params():,}", f"{size:.2f}", str(saves)) == (parameters, step, kept), name
        assert f"{size * saves:.1f}" == total, name
