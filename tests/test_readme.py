"""Every command that README.md and docs/ tell people to type: one of each way through a script is run, at a tiny size,
in a folder that has what a user would have by then; the script's own parser reads the others. Those that need another
machine are only looked at. And what these pages name (files, links, presets, sizes) exists and is right.

How a command of a page becomes a test:

    `torchrun --nproc_per_node=8 train_gpt2.py gpt2-124m`     find_commands: from indented blocks and inline code
    ["train_gpt2.py", "gpt2-124m", "--model.n-layer", ...]    adapt_command: at a tiny size; [] if it runs elsewhere
    test_a_command_of_the_pages_runs, ..._is_parsed           choose_commands: run the first of each way, parse the rest
"""

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

TINY_SIZE = """--model.n-layer 2 --model.n-head 2 --model.n-embd 16 --model.block-size 64 --model.vocab-size 50304
--sequence-length 32 --total-batch-size 64 --micro-batch-size 2 --val-tokens 64 --sample-every 0 --no-compile
--dtype float32 --device cpu""".split()

# ------------------------------------------------------------------------- the commands of the pages

# Programs that cannot run here, and the reason. The files that these commands name must exist all the same.
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

# What a command begins with, perhaps after `!` (a notebook's cell) and settings such as PUSH_TO=OWNER/NAME.
PROGRAMS = r"python|torchrun|make|\./train\.sh|\.venv/bin/python"
COMMAND = re.compile(rf"!?(?:[A-Z_]+=\S+ )*(?:{PROGRAMS}|sbatch|{'|'.join(ELSEWHERE)}) ")

# Commands of other projects, in the table for those who come from there.
OTHER_PROJECTS_COMMAND = re.compile(r" (sample|train)\.py|config/")

# Settings in front of a command that are libraries', not train.sh's.
LIBRARY_VARIABLES = (
    "CUDA_DEVICE_ORDER CUDA_VISIBLE_DEVICES HF_ENDPOINT HF_HOME HF_TOKEN LAMBDA_API_KEY NCCL_DEBUG PIP_INDEX_URL"
).split()


def find_commands(text: str) -> list[str]:
    """The commands of the indented blocks and of the inline code of a page, in order, each once."""
    # Lines of the blocks, those that end with a backslash joined; inline code, which may be broken over two lines.
    blocks = "\n".join(re.findall(r"^    +(.*)", text, re.M)).replace("\\\n", " ")
    inline = "\n".join(" ".join(code.split()) for code in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", text))

    found = []
    for line in f"{blocks}\n{inline}".splitlines():
        if COMMAND.match(line):
            without_comment = re.sub(r"\s+#.*", "", line).removeprefix("!")
            for part in without_comment.split(" && "):
                if COMMAND.match(part + " ") and not OTHER_PROJECTS_COMMAND.search(part):
                    found.append(part.strip())
    return list(dict.fromkeys(found))


COMMANDS = list(dict.fromkeys(command for text in PAGES.values() for command in find_commands(text)))

# What the pages write where this test has something else: names to fill in, models that cannot be downloaded here.
STAND_INS = {
    "OWNER/NAME": "tester/NAME",
    "kjj0/fineweb10B-gpt2 data/fineweb": "tester/NAME data/pulled",
    "log/llmc-124m": "log/gpt2-124m",
    "infer.py log/longer": "infer.py log/quickstart",
    "log/quickstart log/longer": "log/gpt2-124m log/speedrun-124m",
    "model_19073": "model_00002",
    " /shared/": " ",
    " 25000": " 4",
}


def shrink_training(words: list[str]) -> list[str]:
    """The words of a training command, made small and given a new run folder where it would start a run."""
    if "--help" in words or "--card" in words:  # a prediction is as fast at full size
        return words

    # The same network for OpenAI's weights and for imported ones, which are not here.
    words = ["log/gpt2-124m" if word in ("gpt2", "log/old") else word for word in words]
    if "finetune" in words and "--init-from" not in words:
        words = [*words, "--init-from", "log/gpt2-124m"]

    # A resumed run has one epoch of two steps behind it.
    length = ["--steps-per-epoch", "2", "--epochs", "2"] if "--resume" in words else ["--max-steps", "2"]
    starts_a_run = not {"--resume", "--dry-run"} & set(words)
    out = ["--out-dir", "log/new"] if starts_a_run else []
    return [*words, *TINY_SIZE, *length, *out]


def adapt_command(command: str) -> list[str]:
    """The command as it is run here: a script with its arguments, or an empty list where it is for another machine."""
    for on_the_page, here in STAND_INS.items():
        command = command.replace(on_the_page, here)
    words = shlex.split(command)

    # Settings in front of the command must be ones that something reads.
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name = words.pop(0).split("=")[0]
        is_known = name in LIBRARY_VARIABLES or name in (ROOT / "train.sh").read_text()
        assert is_known, f"{name} is no setting of train.sh"

    # There is no Slurm, but tests/test_clouds.py runs the script: what follows goes to the trainer.
    if words[0] == "sbatch":
        words = ["train_gpt2.py", *words[words.index("cloud/slurm.sbatch") + 1 :]]

    # What runs elsewhere names files that exist.
    if words[0] in ELSEWHERE or words[1:3] in (["-m", "pip"], ["-m", "pytest"]):
        for word in words:
            is_our_file = re.fullmatch(r"[\w/-]+\.(yaml|sbatch|py)|.*Dockerfile", word)
            assert not is_our_file or (ROOT / word).is_file(), word
        return []

    if words[0] == "make" or words == ["./train.sh", "--help"]:
        return words

    # It wants a run that is training; tests/test_train_sh.py has one.
    if words[:2] == ["./train.sh", "stop"]:
        return []

    # train.sh hands its arguments to the trainer; `train.sh CHECKPOINT EPOCHS` is a short form of two flags.
    if words[0] == "./train.sh":
        script, args = "train_gpt2.py", words[1:]
        if args[0].endswith(".pt"):
            args = ["--resume", args[0], "--epochs", args[1], *args[2:]]
    else:
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        script, args = words[at], words[at + 1 :]

    if script == "train_gpt2.py":
        args = shrink_training(args)
    elif script == "fineweb.py" and "--verify" not in args:
        args += ["--out", "data/new", "--limit-tokens", "5000"]
    elif script == "infer.py":
        args += ["--max-new-tokens", "2"]
    return [script, *args]


# The flags that send a command another way through its script; other words only change values.
WAYS = re.compile(
    r"--(?:dry-run|resume|init-from|eval-only|tracker|help|source|verify|tensorboard|model|overfit-single-batch)\b|hf://"
)


def choose_commands() -> tuple[list[str], list[str]]:
    """The commands to run, the first of each way through a script, and those to parse only."""
    seen, to_run, to_parse = set(), [], []
    for command in COMMANDS:
        line = adapt_command(command)
        if not line:
            continue
        script, *args = line
        subject = args[:1] if script in ("train_gpt2.py", "hub.py") else []  # the preset, or what to do
        way = (script, *subject, *sorted(set(WAYS.findall(shlex.join(line)))))
        is_test_program = script.startswith("tests/")
        if is_test_program or (script.endswith(".py") and way in seen):
            to_parse.append(command)
        else:
            to_run.append(command)
        seen.add(way)
    return to_run, to_parse


TO_RUN, TO_PARSE = choose_commands()


def test_the_pages_have_commands_of_every_kind():
    assert len(COMMANDS) > 80
    for kind in ("make", "python", "torchrun", "./train.sh", "PUSH_TO", "CUDA_VISIBLE_DEVICES", "sbatch", "scp"):
        assert any(command.startswith(kind) for command in COMMANDS), kind
    for script in "train_gpt2 infer fineweb hub plots hellaswag".split():
        assert any(f"{script}.py" in command for command in COMMANDS), script


# ------------------------------------------------------------------------- running them


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A project folder after a while: data, two finished runs, an old checkpoint, own text; and a Hub that has an
    account for the user."""
    base = tmp_path_factory.mktemp("readme")
    project = base / "project"
    (project / "data").mkdir(parents=True)
    (project / "tests").mkdir()
    for name in ("Makefile", "requirements.txt", "constraints.txt", "tests/requirements.txt", "train.sh"):
        shutil.copy(ROOT / name, project / name)

    # Tokens under the names that the pages use, with and without a manifest; HellaSwag; text of the user's own.
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

        # Finished runs, and a checkpoint as nanoGPT writes it.
        for preset, steps in (("gpt2-124m", "--steps-per-epoch"), ("speedrun-124m", "--max-steps")):
            run_python(here, f"train_gpt2.py {preset} {shlex.join(TINY_SIZE)} {steps} 2")
        shutil.copytree(project / "log" / "gpt2-124m", project / "log" / "quickstart")
        model = open_model(project / "log" / "gpt2-124m")
        old = {"model": model.state_dict(), "model_args": {"n_head": 2}, "iter_num": 19072}
        torch.save(old, project / "old" / "model_19072.pt")

        # On the Hub: the user's tokens and model, and FineWeb.
        shutil.copytree(shards, server.root / "datasets" / "tester" / "NAME")
        shutil.copytree(project / "log" / "gpt2-124m", server.root / "models" / "tester" / "NAME")
        server.private |= {"datasets/tester/NAME", "models/tester/NAME"}
        for name in ("fineweb-edu", "fineweb"):
            repo = server.root / "datasets" / "HuggingFaceFW" / name
            write_parquet(repo / "sample" / "10BT" / "000.parquet", make_documents(1, 60))
        yield here


def run_python(here, line, cwd=None):
    """Run `python SCRIPT ...` in this process or, if it needs the Hub, in one of its own, because the Hub's library
    reads the Hub's address when it is imported."""
    script, *args = shlex.split(line)
    cwd = cwd or here.root
    reads_hub_dataset = script == "fineweb.py" and not re.search("--verify|stdlib|my/", line)
    if reads_hub_dataset or re.search(r"hub\.py (push|pull|check)|hf://", line):
        processes.start(script, *args, log=cwd / "output", cwd=cwd, env=here.env).wait_for_success()
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", [script, *args])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as e:
            assert not e.code, f"{line} ended with {e.code}"


@pytest.mark.parametrize("command", TO_RUN)
def test_a_command_of_the_pages_runs(command, world, tmp_path):
    folder = tmp_path / "project"  # a copy for each: no command needs what another one left
    shutil.copytree(world.root, folder)
    line = adapt_command(command)
    if line == ["make", "quickstart"]:
        run_quickstart(world, folder)
    elif line[0] == "make":
        subprocess.run(["make", "-n", *line[1:]], cwd=folder, capture_output=True, check=True)
    elif line[0] == "./train.sh":
        subprocess.run(line, cwd=folder, capture_output=True, check=True)
    else:
        run_python(world, shlex.join(line), folder)


def run_quickstart(world, folder):
    """The commands that `make quickstart` would run, one after another at a tiny size, without installing anything."""
    (folder / ".venv").mkdir()
    (folder / ".venv" / ".installed").touch()
    done = subprocess.run(["make", "-n", "quickstart"], cwd=folder, capture_output=True, text=True, check=True)
    steps = re.findall(r"^\.venv/bin/(python .*)", done.stdout, re.M)
    assert len(steps) == 4
    shutil.rmtree(folder / "log")
    for step in steps:
        line = shlex.join(adapt_command(step)).replace("log/new", "log/quickstart")
        run_python(world, line, folder)
    assert (folder / "log" / "quickstart" / "curves.png").is_file()


# ------------------------------------------------------------------------- parsing the others


class Parsed(Exception):
    """The arguments of a script were understood."""


def make_parse_only(cli):
    """A stand-in for a function of tyro: it reads the arguments as the real one does, then raises Parsed instead of
    calling what they are for."""

    def do_nothing_with(function):
        return functools.wraps(function)(lambda *_, **__: None)

    def parse_only(target, *args, **kwargs):
        if isinstance(target, dict):  # subcommands by name
            target = {name: do_nothing_with(function) for name, function in target.items()}
        elif not isinstance(target, type):
            target = do_nothing_with(target)
        cli(target, *args, **kwargs)
        raise Parsed

    return parse_only


@pytest.mark.parametrize("command", TO_PARSE)
def test_a_command_of_the_pages_is_parsed(command):
    """The script's own parser takes the arguments; nothing is run."""
    script, *args = adapt_command(command)
    if script == "train_gpt2.py":
        assert parse(args, lambda path: TrainConfig().to_dict())
        return
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(tyro, "cli", make_parse_only(tyro.cli))
        patch.setattr(tyro.extras, "subcommand_cli_from_dict", make_parse_only(tyro.extras.subcommand_cli_from_dict))
        patch.setattr(sys, "argv", [script, *args])
        runpy.run_path(str(ROOT / script), run_name="__main__")


# ------------------------------------------------------------------------- files and links


def test_the_readme_names_every_file():
    """The scripts by name, and in the row of each package the names of its modules."""
    for path in ROOT.glob("*.py"):
        assert f"`{path.name}`" in README, path.name
    for package in [path.parent.name for path in ROOT.glob("*/__init__.py")]:
        rows = re.findall(rf"^\| `{package}/`[^|]*\| (.*)", README, re.M)
        words = set(re.findall(r"\w+", " ".join(rows)))
        modules = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__"}
        assert modules <= words, f"README lacks {modules - words} in the rows of {package}/"
    assert len(README) < 9000, "README is one screen and one page: move what only some readers need to docs/"


# Scripts of other projects, which docs/coming-from.md and docs/reference-implementations.md name.
OTHER_PROJECTS_FILES = (
    "sample.py",
    "train.py",
    "tiny_shakespeare.py",
    "fineweb-edu.py",
    "cached_fineweb10B.py",
    "run.sh",
)


def make_anchors(text):
    """What GitHub makes of the headings of a page."""
    titles = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_points_to_is_there(page):
    text, folder = PAGES[page], (ROOT / page).parent
    for name in re.findall(r"`([\w/-]+\.(?:py|sh|md|ipynb|yaml|sbatch|csv))`", text):
        exists = (ROOT / name).is_file() or (ROOT / "tests" / name).is_file()
        assert exists or name in OTHER_PROJECTS_FILES, name
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if target.startswith("http"):
            continue
        path = (folder / target).resolve() if target else ROOT / page
        assert path.is_file(), target
        assert not anchor or anchor in make_anchors(path.read_text()), f"{target}#{anchor}"


# ------------------------------------------------------------------------- presets

# The pages that list the presets, and the presets that a page leaves out on purpose. A new preset gets a row in each of
# them, or its name here.
PRESETS_LEFT_OUT = {
    "README.md": set(),
    "docs/reference-implementations.md": {"quickstart", "finetune"},  # no other project's recipe
    "docs/renting.md": {"quickstart", "overfit", "finetune"},  # minutes, on any machine: nobody rents for them
    "docs/costs.md": {"quickstart", "overfit"},
}


def names_preset(text: str, preset: str) -> bool:
    """Whether a text has the name of a preset, as a word of its own."""
    return re.search(rf"(?<![\w-]){preset}(?![\w-])", text) is not None


@pytest.mark.parametrize("page", PRESETS_LEFT_OUT)
def test_a_page_that_lists_presets_names_every_one(page):
    found = {preset for preset in PRESETS if names_preset(PAGES[page], preset)}
    missing = PRESETS.keys() - found - PRESETS_LEFT_OUT[page]
    assert not missing, f"{page} does not name {sorted(missing)}: add them there, or to PRESETS_LEFT_OUT above"
    stale = PRESETS_LEFT_OUT[page] & found | PRESETS_LEFT_OUT[page] - PRESETS.keys()
    assert not stale, f"{page} names {sorted(stale)}, or they are presets no longer: remove them from PRESETS_LEFT_OUT"


@pytest.mark.parametrize("page", PAGES)
def test_no_table_names_a_preset_that_does_not_exist(page):
    rows = "\n".join(line for line in PAGES[page].splitlines() if line.startswith("|"))
    named = set(re.findall(r"(?<![\w-])[a-z]+[\w]*-(?:124|350|774|1558)m(?![\w-])", rows))
    assert named <= PRESETS.keys(), f"{page} has {sorted(named - PRESETS.keys())}"


def test_the_sizes_of_checkpoints_are_those_of_the_presets():
    """The table of docs/renting.md: 4 bytes a parameter for weights, 8 for AdamW, 4 for a matrix of Muon's."""
    row = r"^\| `([\w-]+)` \| ([\d,]+) \| ([\d.]+) GB \| (\d+) \| ([\d.]+) GB \|"
    rows = re.findall(row, PAGES["docs/renting.md"], re.M)
    assert {name for name, *_ in rows} == PRESETS.keys() - PRESETS_LEFT_OUT["docs/renting.md"]
    for name, parameters, step_gb, checkpoints, total_gb in rows:
        cfg = PRESETS[name]
        with torch.device("meta"):
            model = GPT(cfg.model)
        groups = optim.parameter_groups(dict(model.named_parameters()), cfg)
        muon_parameters = sum(p.numel() for group in groups.get("muon", []) for p in group["params"])
        size_gb = (12 * model.num_params() - 4 * muon_parameters) / 1e9
        total_steps = cfg.total_steps(10_000_000_000 // cfg.sequence_length)
        saves = -(-total_steps // cfg.save_every)  # rounded up: the last step is saved, too
        expected = f"{model.num_params():,}", f"{size_gb:.2f}", str(saves), f"{size_gb * saves:.1f}"
        assert (parameters, step_gb, checkpoints, total_gb) == expected, name
