"""Train with one replicated strategy: torchrun --standalone --nproc_per_node=2 main_ddp.py --ddp-choice simple_ddp"""

import sys

from ddp import REGISTRY
from ddp_lab.runtime.entrypoint import train_from_command_line

if __name__ == "__main__":
    sys.exit(train_from_command_line("Train a model with one replicated (data-parallel) strategy.", REGISTRY))
