"""From one machine to another through the Hub: push tokens, train from hf://, push the run, pull it, go on, sample."""

import hub_server
from conftest import TINY
from test_hub import make_shards

import checkpoint


def test_a_run_moves_to_another_machine_through_the_hub(run_script, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    tiny = [*TINY, "--model.vocab-size", "50304", "--data-dir", "hf://tester/toy"]
    with hub_server.start(tmp_path / "hub") as server:

        def run(where, *args):
            return run_script(*args, env=server.env(), cwd=where)

        make_shards(here / "toy")
        run(here, "hub.py", "push-data", "toy", "tester/toy")
        run(here, "train_gpt2.py", "quickstart", *tiny, "--max-steps", "6", "--out-dir", "log/run")
        assert (here / "data" / "tester--toy" / "manifest.json").is_file()
        run(here, "hub.py", "push-model", "log/run", "tester/run", "--with-optimizer")
        run(there, "hub.py", "pull-model", "tester/run", "pulled")
        run(there, "train_gpt2.py", "quickstart", *tiny, "--max-steps", "9", "--out-dir", "pulled", "--resume", "auto")
    assert checkpoint.latest_step(there / "pulled") == 9
    said = run_script("infer.py", there / "pulled", "x = ", "--max-new-tokens", "3", cwd=there)
    assert said.stdout.startswith("x = ")
