"""The gradients of several ranks live in DDP's buckets, from the first micro-step on, and lie at the same place in them
before and after a restart."""

import copy
import sys

import torch
from helpers import parse_config

from model import GPT
from system import distributed
from training import optim
from training.step import TrainStep


def storages(train_step):
    """{address: bytes} of the storages that hold the model's gradients."""
    gradients = [p.grad.untyped_storage() for p in train_step.model.parameters()]
    return {storage.data_ptr(): storage.nbytes() for storage in gradients}


def restart_in_the_middle():
    """Train four steps, and again with a new TrainStep after the second. Every rank runs this."""
    cfg = parse_config(*sys.argv[1:])

    def start(rt):
        torch.manual_seed(0)
        return TrainStep(cfg, rt, GPT(cfg.model))

    def train(train_step, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step * train_step.rt.world_size + train_step.rt.rank)
            batch = torch.randint(256, (2, 1, 33), generator=generator).to(torch.uint16)
            train_step.compute_gradients(batch)
            train_step.set_learning_rates(step, 4)
            train_step.update()

    with distributed.session("cpu", "float32") as rt:
        # All gradients together are as large as the parameters, and stay where they are.
        whole = start(rt)
        train(whole, [0])
        buckets = storages(whole)
        assert sum(buckets.values()) == 4 * whole.model.num_params()
        assert len(buckets) < len(list(whole.model.parameters()))
        train(whole, [1, 2, 3])
        assert storages(whole) == buckets

        # A new TrainStep with the state of step 2, as after a restart.
        stopped, resumed = start(rt), start(rt)
        train(stopped, [0, 1])
        resumed.model.load_state_dict(stopped.model.state_dict())
        optim.load_state(resumed.optimizers, copy.deepcopy([o.state_dict() for o in stopped.optimizers]))
        train(resumed, [2, 3])
        same = [torch.equal(p, q) for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True)]
        print("same bits" if all(same) else f"{same.count(False)} parameters differ")


def test_a_restart_of_three_ranks_sums_gradients_in_the_same_order(run_ranks, tiny_args):
    """Two ranks have only one order; with three, the place of a gradient in its bucket decides which ranks are summed
    first."""
    flags = ["--model.n-embd", "128", "--total-batch-size", 6 * 32, "--micro-batch-size", "1"]
    output = run_ranks(3, restart_in_the_middle, "quickstart", *tiny_args, *flags)
    assert output.count("same bits") == 3, output
