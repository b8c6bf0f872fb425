"""torchrun without the traceback in which it ends after a rank has failed: each rank has printed its own error.

    python -m cloud.torchrun --standalone --nproc_per_node=8 train_gpt2.py gpt2-124m

The flags and the exit code are torchrun's. Called by cloud/supervisor.py, so that the error is at the end of the log.
"""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except ChildFailedError:
        sys.exit(1)
