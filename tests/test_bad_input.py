"""Mistakes on a command line, and files that are not what they should be: each ends in one message that names it.

A row of the table is an exit code, a command, and what its message must name. The commands run in a folder with

    tiny, run      the data and the checkpoints of conftest.one_run
    weights        a model without its optimizer state
    small          a model of one layer that reads 8 tokens; odd.pt lacks GPT-2's last token,
                   and wide.pt has twice as many
    cut            a shard, a checkpoint and metrics that were cut off; a checkpoint that is none
    circle         a link to itself
    *.*            texts and HellaSwag rows; line 2 of bad.jsonl is neither

and must leave it as it is. NEW is a path beside it, TRAIN a training run over `tiny` into NEW.
What is refused because of other ranks, of other processes or of the Hub's answers is tested with the module that
refuses it.
"""

import json
import shlex
import shutil

import pytest
import torch
from faults.hub_server import Hub
from helpers import TINY_FLAGS, read_table, run_main

from checkpoints import checkpoint
from model import GPT, GPTConfig

# 1: one line on stderr begins with "error:". 2: the parser does not know a word, or there is no such network.
TABLE = """
1 | train_gpt2.py quickstart --sequence-length 0           | --sequence-length 0
1 | train_gpt2.py --total-batch-size 1000                  | --total-batch-size 1024
1 | train_gpt2.py --sequence-length 2048                   | --sequence-length 2048
1 | train_gpt2.py --micro-batch-size 0                     | --micro-batch-size 0
1 | train_gpt2.py --val-tokens 1023                        | --val-tokens 1023
1 | train_gpt2.py --min-lr 1                               | --min-lr 1.0
1 | train_gpt2.py --save-every -1                          | --save-every -1
1 | train_gpt2.py --cooldown 1.5                           | --cooldown 1.5
1 | train_gpt2.py --weight-decay nan                       | --weight-decay nan
1 | train_gpt2.py --time-limit soon                        | soon
1 | train_gpt2.py --seed 9223372036854775808               | --seed 9223372036854775808
2 | train_gpt2.py --seeed 1                                | --seeed
2 | train_gpt2.py --see 1                                  | --see
2 | train_gpt2.py --max-steps x                            | 'x'
2 | train_gpt2.py --max-steps                              | --max-steps
2 | train_gpt2.py --max-steps 1.5                          | 1.5
2 | train_gpt2.py --micro-batch-size many                  | many
2 | train_gpt2.py --optimizer sgd                          | sgd
2 | train_gpt2.py --zero-stage 2                           | 2
2 | train_gpt2.py --shuffle=1                              | --shuffle/--no-shuffle: takes no value, but has '1'
2 | train_gpt2.py --model.n-head 5                         | n_head 5
2 | train_gpt2.py --model.norm batch                       | batch
2 | train_gpt2.py quickstart overfit                       | overfit
2 | train_gpt2.py quickstrat                               | quickstart
2 | train_gpt2.py --dry-run --eval-only                    | --eval-only
2 | train_gpt2.py --card                                   | --card
2 | train_gpt2.py --dry-run --card H100                    | --card
1 | train_gpt2.py finetune --data-dir none --card H100     | none is not a folder of shards
1 | train_gpt2.py quickstart --card 8xH900                 | 'H900'
1 | train_gpt2.py gpt2-124m --card 7xH100                  | --total-batch-size 523264
1 | train_gpt2.py --card H100 --dtype float32              | --dtype float32
1 | train_gpt2.py finetune --init-from gpt2-xl --card H100 | --init-from gpt2-xl
1 | train_gpt2.py --resume NEW/model_00001.pt              | new/model_00001.pt
1 | train_gpt2.py --resume run/model_00005.pt              | run has the steps 3, 6, 9, 12
1 | train_gpt2.py --resume ./rnu                           | run, small, weights
1 | train_gpt2.py --resume weights/model_00003.pt          | weights/model_00003.pt
1 | train_gpt2.py --resume text.txt                        | text.txt
1 | TRAIN --model.vocab-size 100                           | vocab-size 100
1 | TRAIN --micro-batch-size 3                             | --micro-batch-size 3
1 | TRAIN --max-steps 0 --total-batch-size 1048576         | --total-batch-size 1048576
1 | TRAIN --device cuda                                    | --device cuda
1 | train_gpt2.py --data-dir none --out-dir NEW            | --device cpu
1 | TRAIN --device cpu:1                                   | --device cpu:1
1 | TRAIN --device cuda:x                                  | --device cuda:x
1 | TRAIN --data-dir none                                  | none
1 | TRAIN --data-dir cut                                   | cut/cut_train_000001.npy
1 | TRAIN --data-dir data/fineweb                          | pull-data kjj0/fineweb10B-gpt2 data/fineweb
1 | TRAIN --hellaswag-every 5 --hellaswag-data none.jsonl  | none.jsonl
1 | TRAIN --init-from none.pt                              | none.pt
1 | train_gpt2.py finetune --data-dir tiny --out-dir NEW --init-from small --sequence-length 16 | --sequence-length 16
1 | TRAIN --eval-only                                      | --init-from
1 | TRAIN --out-dir run                                    | --resume auto
1 | TRAIN --resume run --out-dir run --max-steps 13 --seed 1 | seed: 1337 -> 1; to keep the old ones
1 | TRAIN --resume run --max-steps 13 --no-shuffle --max-lr 1 | --shuffle: True -> False; --max-lr: 0.003 -> 1.0
1 | TRAIN --resume run --model.n-head 4 --allow-drift      | --model.n-head: 2 -> 4
1 | TRAIN --resume run --model.vocab-size 512 --allow-drift | 256 -> 512
1 | TRAIN --resume run --optimizer muon --allow-drift      | adamw -> muon
1 | TRAIN --resume run/model_00006.pt --max-steps 11       | --max-steps: 12 -> 11
1 | TRAIN --init-from weights --model.n-layer 3            | n_layer=2
1 | TRAIN --stop-off-track                                 | no public runs
1 | TRAIN --out-dir text.txt                               | text.txt
1 | TRAIN --out-dir circle/run                             | circle/run
1 | fineweb.py --source none.txt                           | none.txt
1 | fineweb.py --source '*.none' --out NEW                 | *.none
1 | fineweb.py --source text.txt                           | --out
1 | fineweb.py --source text.txt bad.xml --out NEW         | bad.xml
1 | fineweb.py --source bad.jsonl --out NEW                | bad.jsonl (line 2
1 | fineweb.py --source empty.jsonl --out NEW              | too little text in empty.jsonl
1 | fineweb.py --source empty.txt --out NEW                | too little text in empty.txt
1 | fineweb.py --source separated.txt --out NEW            | too little text in separated.txt
1 | fineweb.py --source rows.jsonl --out NEW               | too little text in rows.jsonl
1 | fineweb.py --source OWNER/NAME --out NEW               | 127.0.0.1:9
1 | fineweb.py --source tiny --out NEW                     | --source tiny names no file
2 | fineweb.py --source text.txt --shard-size 1.5          | --shard-size
2 | fineweb.py --source text.txt --limit-tokens inf        | --limit-tokens
2 | TRAIN --batch_size 32                                  | docs/coming-from.md
2 | TRAIN --max_step 32                                    | no flag --max-step; did you mean --max-steps?
2 | infer.py small --temprature=1 once                     | no flag --temprature=1; did you mean --temperature?
2 | hub.py push-model small OWNER/NAME --with-optimiser    | did you mean --with-optimizer?
1 | hellaswag.py --limit -1                                | --limit -1
1 | hellaswag.py --data empty.jsonl                        | empty.jsonl
1 | hellaswag.py --data NEW --url http://127.0.0.1:9/x     | http://127.0.0.1:9/x
1 | hellaswag.py --data good.jsonl --model small           | reads 8
1 | hub.py push-data cut OWNER/NAME                        | cut_train_000001.npy
1 | hub.py push-model tiny OWNER/NAME                      | tiny
1 | hub.py push-model cut/foreign.pt OWNER/NAME            | cut/foreign.pt
1 | hub.py push-model weights OWNER/NAME --with-optimizer  | optim_00003.pt
1 | hub.py export small tiny                               | tiny
1 | hub.py import text.txt NEW                             | text.txt
1 | hub.py import small/model_00001.pt run                 | run
1 | infer.py small --temperature -1                        | --temperature -1
1 | infer.py small --top-p 0                               | --top-p 0
1 | infer.py small --top-p 1.1                             | --top-p 1.1
1 | infer.py small --top-k -1                              | --top-k -1
1 | infer.py small 'one two three four five six 7 8 9'     | 9 tokens
1 | infer.py cut/foreign.pt                                | hub.py import cut/foreign.pt
1 | infer.py run/optim_00003.pt                            | optim_00003.pt contains no model
1 | infer.py cut/model_00001.pt                            | cut/model_00001.pt
1 | infer.py .                                             | run, small, weights
1 | infer.py ./rnu                                         | no model at rnu
1 | infer.py OWNER/NAME                                    | refused; check the network
1 | infer.py small/odd.pt Hello                            | 50256 tokens
1 | infer.py small/wide.pt Hello                           | 100352 tokens
1 | plots.py none                                          | none
1 | plots.py cut                                           | cut
1 | plots.py .                                             | runs
2 | hub.py pull-data OWNER/NAME                            | data_dir
"""


@pytest.fixture(scope="session")
def stage(one_run, tmp_path_factory):
    """The folder that the docstring describes."""
    folder = shutil.copytree(one_run.parent, tmp_path_factory.mktemp("stage") / "files")
    for name in ("weights", "small", "cut"):
        (folder / name).mkdir()
    shutil.copy(folder / "run" / "model_00003.pt", folder / "weights")
    for name, vocab_size in (("model_00001.pt", 50304), ("odd.pt", 50256), ("wide.pt", 100352)):
        network = GPTConfig(block_size=8, vocab_size=vocab_size, n_layer=1, n_head=1, n_embd=8)
        checkpoint.write(folder / "small" / name, checkpoint.model_file(GPT(network), 1))

    shutil.copy(folder / "tiny/tiny_val_000000.npy", folder / "cut/cut_val_000000.npy")
    shard = (folder / "tiny/tiny_train_000001.npy").read_bytes()
    (folder / "cut/cut_train_000001.npy").write_bytes(shard[:-1])
    (folder / "cut/model_00001.pt").write_bytes((folder / "small/model_00001.pt").read_bytes()[:-99])
    torch.save({"model": {"w": torch.ones(2)}}, folder / "cut/foreign.pt")

    row = json.dumps({"text": "a", "ctx": "a", "endings": ["b " * 9] * 4, "label": 0})
    (folder / "circle").symlink_to("circle")
    texts = {
        "cut/metrics.jsonl": '{"step": 0',
        "text.txt": "some text " * 100,
        "bad.xml": "<x/>",
        "empty.jsonl": "\n\n",
        "empty.txt": "",
        "separated.txt": "<|endoftext|>\n",
        "rows.jsonl": '{"text": ""}',
        "good.jsonl": f"{row}\n",
        "bad.jsonl": f'{row}\n{{"text": 3}}\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("code, command, named", read_table(TABLE))
def test_a_mistake_is_named_in_one_message(stage, tmp_path, monkeypatch, capsys, code, command, named):
    train = ["train_gpt2.py", "quickstart", *TINY_FLAGS, "--data-dir", "tiny", "--out-dir", "NEW"]
    command = command.replace("TRAIN", shlex.join(train))
    words = shlex.split(command.replace("NEW", str(tmp_path / "new")))
    files = sorted(stage.rglob("[!.]*"))

    monkeypatch.chdir(stage)
    Hub(tmp_path / "hub", "http://127.0.0.1:9").connect(monkeypatch)
    found = run_main(*words)

    message = capsys.readouterr().err
    assert str(found) == code and named in message and "Traceback" not in message, message
    if code == "1":
        assert [line[:6] for line in message.splitlines()].count("error:") == 1
    assert sorted(stage.rglob("[!.]*")) == files
