"""Whether a run is on track: compares each val loss with the public runs of the same recipe at that step.

verdict = Verdict(cfg, max_steps)
if verdict.is_lost(now, row):       # prints "step 250: val 6.430, reference 6.070 to 6.243: off track, ..."
    stop.request("--stop-off-track")
"""

from evaluation import reference
from system.errors import require
from system.facts import RESULT, compare
from system.printing import print0
from tokens import sources
from training.config import TrainConfig, settings_facts
from training.presets import PRESETS
from training.schedule import Step

# These settings change the loss no more than another seed would, so the public runs stay comparable. The size of the
# vocabulary is among them, because rows that only pad it are not used.
LIKE_A_SEED = {"--seed", "--shuffle", "--param-dtype", "--model.vocab-size"}
MAX_OFF_TRACK = 2  # val losses in a row, after which --stop-off-track ends a run


class Verdict:
    """Judges the val losses of a run. Raises UserError if --stop-off-track has nothing to compare with."""

    def __init__(self, cfg: TrainConfig, max_steps: int):
        self.cfg = cfg
        self.reference = choose_reference(cfg, max_steps) if cfg.val_every else None
        self.off_track = 0  # how many val losses in a row were off track
        require(
            self.reference or not cfg.stop_off_track, "--stop-off-track: no public runs are like this; leave it out"
        )

    def is_lost(self, now: Step, row: dict[str, float]) -> bool:
        """Print whether the val loss of this step, if there is one, is on track. A loss that is too low is off track as
        well: no honest run is that good, so something must leak. Returns whether --stop-off-track should end the run.
        """
        if self.reference is None or "val_loss" not in row:
            return False
        expected, loss = self.reference.expected_range(now.number), row["val_loss"]
        if expected is None:  # the public runs have no loss for this step
            return False
        low, high = expected
        is_on_track = low <= loss <= high  # NaN is not
        if is_on_track:
            verdict = "on track"
        elif loss < low:
            verdict = f"off track, {low - loss:.3f} too low: "
            verdict += "does attention see the future, or val overlap the train data?"
        else:
            verdict = f"off track, {loss - high:.3f} too high: check --max-lr, --warmup-steps and the data"
        print0(f"step {now.number}: val {loss:.3f}, reference {low:.3f} to {high:.3f}: {verdict}")
        self.off_track = 0 if is_on_track else self.off_track + 1
        return self.cfg.stop_off_track and self.off_track >= MAX_OFF_TRACK


def choose_reference(cfg: TrainConfig, max_steps: int) -> reference.Reference | None:
    """Print and return the public runs to compare a run of max_steps with. Returns None if there are none for this
    preset, length and batch, if the run starts from trained weights, whose loss is much lower, if its recipe differs,
    or if neither the manifest nor the first words show that the data are the same."""
    public_runs = reference.find_reference(cfg.preset, max_steps, cfg.total_batch_size)
    if public_runs is None or cfg.init_from != "scratch":
        return None

    facts = settings_facts(cfg)
    changed = compare(settings_facts(PRESETS[cfg.preset]), facts).keys() - LIKE_A_SEED
    different = sorted(name for name in changed if facts[name].scope == RESULT)
    dataset = reference.DATASETS[cfg.preset]
    if sources.identify(cfg.data_dir) != dataset:
        different.append(f"the data of {cfg.data_dir}")
    if different:
        print0(f"no reference: the public runs of {cfg.preset}, on {dataset}, differ in {', '.join(different)}")
        return None
    print0(f"reference: {public_runs.runs} public runs of {cfg.preset}, on {dataset}")
    return public_runs
