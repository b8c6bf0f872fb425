"""README.md and docs/: what they name exists, their commands are understood, their links lead somewhere."""

import argparse
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import read_documents
from helpers import CPU, ROOT, TINY_FLAGS, parse_config, write_tiny_model

from evaluation import evaluations
from lifecycle import command_line
from lifecycle.build import build_trainer
from model import GPT
from system import process
from training.config import TrainConfig
from training.presets import PRESETS

PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
FILES = {
    str(path.relative_to(ROOT)): path
    for folder in ("", "*/", "tests/faults/")
    for path in ROOT.glob(f"{folder}*.*")
    if path.suffix in {".py", ".sh", ".md", ".csv", ".ipynb", ".sbatch", ".yaml", ".toml", ".txt", ".json", ".png"}
} | {name: ROOT / name for name in ("Makefile", "cloud/Dockerfile")}
SOURCES = {name: path.read_text() for name, path in FILES.items() if path.suffix not in {".md", ".png", ".json"}}
WORDS = set(re.findall(r"\w+", "\n".join(text for name, text in SOURCES.items() if name != "tests/test_docs.py")))

# Names in code style that belong to other programs, or that the reader makes.
OTHERS = set("""
    mine.py my/new.txt old.txt few.txt input.txt pytorch_model.bin gpt2_124M.bin gpt2_124M export_hf.py export_hf
    convert_hf_to_gguf num_ctx trust_remote_code from_pretrained save_pretrained generated_text GPT2LMHeadModel
    lambada_openai arc_easy model_args NCCL_DEBUG NCCL_SOCKET_IFNAME NCCL_IB_DISABLE NCCL_P2P_DISABLE
    CUDA_VISIBLE_DEVICES LAMBDA_API_KEY RUNPOD_POD_ID PIP_INDEX_URL WANDB_NAME WANDB_PROJECT all_reduce
    val_loss_ema hf_ instance_ids DictReader field_size_limit MyDrive GLOO_SOCKET_IFNAME q8_0 my.csv name.py
    val_loss_books ADDRESS_OF_THIS_REPOSITORY HF_USER use_compile eval_iters read_table to_pylist
    --gpus-per-node --constraint --exclude --local-addr --model_args --batch_size --max_steps
""".split())  # fmt: skip


# The flags and names of the worked changes.
PATCHES = {path.stem: path.read_text() for path in ROOT.glob("docs/patches/*.diff")}
PATCH_FLAGS = {flag for text in PATCHES.values() for flag in re.findall(r"--[\w.-]+", text.partition("diff --git")[0])}
OTHERS |= PATCHES.keys() | {f"{name}.diff" for name in PATCHES}


def find_code(name):
    """The blocks and inline code of a page, but for diffs, and for what a table has beside its last column, if that is
    about this project."""
    text = PAGES[name].replace("\\\n", " ")
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        if table.splitlines()[0].endswith(("| here |", "| this project |", "| this project's |")):
            text = text.replace(table, re.sub(r"^\|.*\| (.*) \|$", r"\1", table, flags=re.MULTILINE))
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    return [*blocks, *re.findall(r"^    +(.*)", text, re.MULTILINE), *spans]


def find_commands(name):
    """[script, argument, ...] of each command of a page that runs a script of the project."""
    script = r"(?:python |torchrun (?:[^#\n]* )?|(?=\./train\.sh))(\w+\.py|\./train\.sh)\b"
    command = script + r"((?:(?! && |; | < )[^#|\n])*)"
    found = re.findall(command, "\n".join(find_code(name)))
    return [[name, *shlex.split(arguments)] for name, arguments in found if name.removeprefix("./") in FILES]


COMMANDS = sorted({shlex.join(command) for name in PAGES for command in find_commands(name)})


class Parsed(Exception):
    """The command line was understood."""


@pytest.fixture
def parse_only(monkeypatch):
    """Scripts parse their command line, and do nothing else."""
    for name in ("parse_args", "parse_intermixed_args"):
        original = getattr(argparse.ArgumentParser, name)

        def parse(parser, original=original):
            original(parser)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, name, parse)
    monkeypatch.setattr(process, "run_cli", lambda main: main())  # which ends with an exit code


@pytest.mark.parametrize("command", COMMANDS)
def test_the_script_understands_the_command(command, request, monkeypatch):
    script, *args = shlex.split(command.replace("PRESET", "gpt2-124m").replace("$rate", "1e-3"))
    if PATCH_FLAGS.intersection(args) or args == ["-h"]:  # known with the patch only
        return
    if script == "./train.sh":
        if args and (args[0] in ("stop", "[gpt2-124m]", "--help") or args[0].endswith(".pt")):
            return
        script = "train_gpt2.py"
    if script == "train_gpt2.py":
        saved = {"config": PRESETS["quickstart"].to_dict(), "defaults": TrainConfig().to_dict()}
        monkeypatch.setattr(command_line, "read_train_state", lambda path: saved)
        command_line.parse(args)
        return
    request.getfixturevalue("parse_only")
    monkeypatch.setattr(sys, "argv", [script, *args])
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / script), run_name="__main__")


@pytest.mark.parametrize("name", PAGES)
def test_every_name_in_code_style_exists(name):
    """A flag of a script, a file of the tree, or an identifier: a word with an underscore, or a capital letter after a
    small one."""
    scripts = "\n".join(text for file, text in SOURCES.items() if "/" not in file)
    flags = {*re.findall(r'"(--[\w-]+)"', scripts), *OTHERS, *PATCH_FLAGS}
    flags |= set(re.findall(r"--[\w.-]+", command_line.make_parser(PRESETS["gpt2-124m"]).format_help()))
    missing = []
    for code in find_code(name):
        if code.startswith("--"):
            missing += set(re.findall(r"--[a-z][\w.-]+", code)) - flags
        code = re.sub(r"https?://\S+|#.*", "", code)
        for path in re.findall(r"[\w/.-]*\w\.(?:py|sh|csv|sbatch|yaml|ipynb)\b", code):
            is_here = any(f"/{file}".endswith(f"/{path.removeprefix('./')}") for file in FILES)
            missing += [] if is_here or path in OTHERS or path.startswith("$") else [path]
        for word in re.findall(r"(?<![\w/-])[A-Za-z]\w*", code):
            is_identifier = "_" in word or re.search("[a-z][A-Z]", word)
            is_file_of_a_run = re.fullmatch(r"(model|optim)_\d+", word)
            if is_identifier and not is_file_of_a_run and word not in WORDS | OTHERS:
                missing.append(word)
    assert sorted(set(missing)) == []


def find_anchors(path):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_between_pages_lead_somewhere(name):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)", PAGES[name]):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = (ROOT / name).parent / path if path else ROOT / name
        if not target.is_file() or (anchor and anchor not in find_anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_lines_that_convert_to_jsonl_lose_nothing(tmp_path):
    """Of Excel's UTF-8, an article with line breaks that is longer than csv's limit; of code, a file of another
    encoding. What fails writes nothing, so that no part is taken for the whole."""
    article, converted = "two\r\nlines, " * 12_000, tmp_path / "my.jsonl"
    (tmp_path / "my").mkdir()
    (tmp_path / "my/b.c").write_bytes(b"// caf\xe9")
    (tmp_path / "my.csv").write_bytes(f'\ufefftext\r\nfirst\r\n"{article}"\r\n'.encode())
    (tmp_path / "my.txt").write_text("one line\nthe next\n")
    pq.write_table(
        pa.table({"question": ["why?", "how?"], "n": [1, 2], "answer": ["because", "so"]}), tmp_path / "my.parquet"
    )

    lines = [line.strip() for line in PAGES["docs/data.md"].splitlines() if line.endswith("> my.jsonl")]
    lines = [line.replace("python", shlex.quote(sys.executable), 1) for line in lines]
    expected = [["first", article], ["why?\nbecause", "how?\nso"], ["one line", "the next"], ["// caf\ufffd"]]
    for line, documents in zip(lines, expected, strict=True):
        subprocess.run(line, shell=True, cwd=tmp_path)
        assert read_documents(converted) == documents
    (tmp_path / "my.csv").write_bytes(b"text\none\ncaf\xe9\n")
    subprocess.run(lines[0], shell=True, cwd=tmp_path)
    assert not converted.read_bytes()


def test_the_loop_over_prompts_runs(tmp_path, capsys):
    (snippet,) = [block for block in find_python("docs/using-your-model.md") if "model.generate" in block]
    exec(snippet.replace("log/gpt2-124m", str(write_tiny_model(tmp_path / "run", 64, 8))), {})
    assert re.search("^Once upon a time.*^The capital of France is", capsys.readouterr().out, re.MULTILINE | re.DOTALL)


def find_python(name):
    """The indented blocks of a page, but for commands of a shell and the drawing of a step."""
    blocks = map(textwrap.dedent, re.findall(r"(?:^ {4}.*\n(?:\n(?= {8}))?)+", PAGES[name], re.MULTILINE))
    return [block for block in blocks if not re.search(r"^(?:cp|make|python) |\+->", block, re.MULTILINE)]


def test_the_lines_for_a_value_of_the_step_set_it():
    (snippet,) = [block for block in find_python("docs/changing.md") if "param_groups" in block]
    cfg = parse_config("quickstart", *TINY_FLAGS, "--optimizer muon")
    trainer = build_trainer(GPT(cfg.model), cfg, CPU, cfg.max_steps)
    exec(snippet, {"self": trainer, "now": SimpleNamespace(momentum=0.875)})
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    assert [group["momentum"] for group in groups if "momentum" in group] == [0.875, 0.875]  # Muon's


def test_the_evaluation_of_changing_the_code_measures(tiny_data, tmp_path, monkeypatch):
    (snippet,) = [block for block in find_python("docs/changing.md") if block.startswith("class ")]
    names = {**vars(evaluations), "replace": replace}
    exec(snippet, names)
    cfg = parse_config("quickstart", *TINY_FLAGS, "--data-dir", tiny_data)
    trainer = build_trainer(GPT(cfg.model), cfg, CPU, cfg.max_steps)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/books").symlink_to(tiny_data)
    row = evaluations.measure([evaluations.Validation(cfg), names["Books"](cfg)], trainer, "")
    assert row["val_loss_books"] == row["val_loss"]
