"""Check that all ranks of a run still have the same weights: DDP averages gradients, but never compares the weights.

    replicas.check_cards(cfg, rt)                  # before training: Muon on different cards needs ZeRO-1
    message = replicas.find_difference(rt, train_step.weights.named)      # at every save; "" if there is none

Called by train_gpt2.py. Each rank updates its own copy of the weights from the same gradients. The copies stay equal
bit for bit as long as the kernels that compute the update give the same bits on every card. Cards of two architectures
may round differently, and a defective card computes wrong numbers; from then on the ranks train different models, and
only rank 0's is saved. With ZeRO-1 one rank computes each update and sends it to the others: copies cannot drift apart.
"""

from __future__ import annotations

import shlex
import socket
from collections import Counter

import torch
from torch import Tensor, nn

from system import machine
from system.cli import UserError, print0
from system.distributed import Runtime, describe_ranks
from training.checkpoint import CheckpointWriter, model_path
from training.config import TrainConfig

# How many numbers are summed at a time: torch first converts them to int64, which takes memory beside the weights.
CHUNK_NUMEL = 2**22

# The folder inside the run's that gets rank 0's state when the ranks differ.
FOLDER = "ranks-differ"


def weight_sums(named: dict[str, nn.Parameter]) -> Tensor:
    """For each parameter the sum of its bit patterns, read as 32-bit integers: (parameters,) int64, on their device.
    Sums of integers are exact in any order, so equal weights have equal sums on any card."""
    # One sum for each parameter, so that a parameter that differs can be named.
    sums = []
    for p in named.values():
        # Any shape, float32 -> (numbers,) int32: the same bits, so that not even a change of the last one is lost.
        bits = p.detach().reshape(-1).view(torch.int32)
        sums.append(torch.stack([chunk.sum(dtype=torch.int64) for chunk in bits.split(CHUNK_NUMEL)]).sum())
    return torch.stack(sums)


def find_difference(rt: Runtime, named: dict[str, nn.Parameter]) -> str:
    """Say which ranks have other float32 weights than the majority, and in which parameters; "" if all ranks have the
    same. One collective transfers 8 bytes per parameter and rank. Every rank must call it; all get the same answer."""
    if rt.world_size == 1:
        return ""

    # In a healthy run all ranks have the same sums, and nothing else is exchanged.
    sums_by_rank = torch.stack(rt.all_gather(weight_sums(named))).tolist()  # (ranks, parameters)
    copies = [tuple(sums) for sums in sums_by_rank]
    if len(set(copies)) == 1:
        return ""

    # The weights of the majority count as correct; in a tie, rank 0's.
    most_common = Counter(copies).most_common(1)[0][0]
    if copies.count(copies[0]) == copies.count(most_common):
        most_common = copies[0]
    others = [rank for rank, copy in enumerate(copies) if copy != most_common]
    names = [name for i, name in enumerate(named) if any(copies[rank][i] != most_common[i] for rank in others)]

    # Name the machines and cards of these ranks: they may share the cause of the difference.
    places = rt.gather(f"{socket.gethostname()}, {machine.device_name(rt.device)}")
    parameters = f"{names[0]} and {len(names) - 1} other parameters" if len(names) > 1 else names[0]
    return f"the weights of {describe_ranks(others, places)} differ from those of the other ranks in {parameters}"


def error_after_saving(
    cfg: TrainConfig, rt: Runtime, step: int, difference: str, writer: CheckpointWriter
) -> Exception:
    """The error that ends a run whose ranks differ, once `writer` has saved rank 0's state in FOLDER. A restart gives
    all ranks the weights of the newest checkpoint, so it can be retried; but different cards would drift apart again,
    so for them the error is final. Every rank must call it."""
    # Only rank 0 writes, and knows how that ended. The others wait for it, and repeat in their errors what it says:
    # torchrun may show the error of any rank.
    try:
        writer.wait()
        kept = model_path(writer.run_dir, step)
        command = f"--resume {shlex.quote(str(kept))}"
        outcome = f"rank 0's state is kept as {kept}, in case you want to continue from that: {command}"
    except (UserError, OSError) as e:
        outcome = f"rank 0's state could not be kept: {e}"
    rt.barrier(hours=2)
    outcome = rt.gather(outcome)[0]

    # Different cards explain the difference, and will differ again. Equal ones should not have differed.
    problem = f"{difference} at step {step}, so this step is not saved as a checkpoint of the run"
    fix = "the same command with --resume auto continues from the newest checkpoint, where all ranks were equal"
    if len(set(cards_by_rank(rt))) > 1:
        return UserError(f"{problem}. The cards of this run differ: add --zero-stage 1; {fix}; {outcome}")
    hint = "If the same rank differs again, its card is defective"
    return RuntimeError(f"{problem}; {fix}. {hint}; {outcome}")


def cards_by_rank(rt: Runtime) -> list[str]:
    """The name of every rank's GPU, or of its CPU. Every rank must call it."""
    return rt.gather(machine.device_name(rt.device))


def check_cards(cfg: TrainConfig, rt: Runtime) -> None:
    """Raise UserError on every rank if the ranks have different cards and use Muon, which multiplies matrices in
    bfloat16: other kernels on each architecture would certainly give other updates. With AdamW, print a note. Every
    rank must call it."""
    # Equal cards round alike. With ZeRO-1, one rank computes each update for all.
    cards = cards_by_rank(rt)
    if len(set(cards)) == 1 or cfg.zero_stage == 1:
        return

    # Which ranks have which card: "NVIDIA A100 (rank 0, 1), NVIDIA H100 (rank 2, 3)".
    ranks_by_card: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        ranks_by_card.setdefault(card, []).append(rank)
    found = ", ".join(f"{card} (rank {', '.join(map(str, ranks))})" for card, ranks in ranks_by_card.items())

    # Muon's updates would differ in every step, AdamW's may stay equal.
    match cfg.optimizer:
        case "muon":
            problem = f"--optimizer muon on different cards: {found}. Each card would round its updates differently"
            raise UserError(f"{problem}, and the ranks' weights would drift apart; add --zero-stage 1")
        case _:
            print0(
                f"the cards of this run differ: {found}. The ranks compare their weights at every save; "
                "--zero-stage 1 keeps them equal on any cards"
            )
