"""The flags of other trainers, answered by name when somebody types them here.

    explain_foreign_flags(["--max_iters=100"])      # ["--max_iters is --max-steps here"]

Called by train_gpt2.py once a command line was refused.
"""

from training.config import TrainConfig, flag

# The flags of nanoGPT, llm.c and DDP-BASEMODEL-TRAIN, and what they are here; docs/coming-from.md says more.
FOREIGN_FLAGS = {
    "--max_iters": "--max-steps",
    "--num_iterations": "--max-steps",
    "--batch_size": "--micro-batch-size (and --total-batch-size, in tokens, is the batch of a step)",
    "--block_size": "--sequence-length, for a small network with --model.block-size,",
    "--gradient_accumulation_steps": "not needed (it follows from --total-batch-size)",
    "--learning_rate": "--max-lr",
    "--learning_rate_decay_frac": "--min-lr, a rate,",
    "--decay_lr": "not needed (--schedule ends at --max-steps)",
    "--lr_decay_iters": "not needed (--schedule ends at --max-steps)",
    "--warmup_iters": "--warmup-steps",
    "--beta1": "a setting of the presets (training/presets.py)",
    "--beta2": "0.95, always,",
    "--dropout": "nothing: there is none",
    "--eval_interval": "--val-every",
    "--val_loss_every": "--val-every",
    "--eval_iters": "--val-tokens, in tokens,",
    "--log_interval": "not needed (every step is logged)",
    "--always_save_checkpoint": "--save-every",
    "--save_every_niter": "--save-every",
    "--backend": "not needed (NCCL on GPUs, gloo on CPUs)",
    "--dataset": "--data-dir",
    "--input_bin": "--data-dir",
    "--input_train_bin": "--data-dir",
    "--input_val_bin": "--data-dir",
    "--output_dir": "--out-dir",
    "--n_layer": "--model.n-layer",
    "--n_head": "--model.n-head",
    "--n_embd": "--model.n-embd",
    "--bias": "--model.bias or --model.no-bias",
    "--wandb_log": "--tracker wandb",
    "--wandb_project": "WANDB_PROJECT, a variable of the environment,",
    "--wandb_project_id": "WANDB_PROJECT, a variable of the environment,",
    "--wandb_run_name": "WANDB_NAME, a variable of the environment,",
    "-b": "--micro-batch-size",
    "-c": "--weight-decay",
    "-d": "--total-batch-size",
    "-e": "a preset (llmc-124m, gpt2-350m, ...) as the first word",
    "-i": "--data-dir",
    "-j": "--data-dir",
    "-l": "--max-lr",
    "-n": "--save-every",
    "-o": "--out-dir",
    "-q": "--min-lr, a rate,",
    "-r": "--recompute",
    "-s": "--sample-every",
    "-t": "--sequence-length",
    "-u": "--warmup-steps",
    "-v": "--val-every",
    "-x": "--max-steps",
    "-y": "--resume auto",
    "-z": "--zero-stage",
}


def explain_foreign_flags(words: list[str]) -> list[str]:
    """What the flags of other trainers on a command line are here, a sentence each."""
    sentences = []
    switches = [flag(name) for name, value in vars(TrainConfig()).items() if isinstance(value, bool)]
    for word in words:
        name, equals, _ = word.partition("=")
        switch = name.replace("_", "-")
        if name in FOREIGN_FLAGS:
            sentences.append(f"{name} is {FOREIGN_FLAGS[name]} here")
        elif equals and switch in switches:
            sentences.append(f"switches take no value: {switch} or --no-{switch.removeprefix('--')}")
    return sentences
