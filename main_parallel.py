"""Train on a mesh: torchrun --standalone --nproc_per_node=4 main_parallel.py --mesh dp=2,tp=2 --ddp-choice zero2"""

import sys

from ddp_lab.runtime.entrypoint import train_from_command_line
from tensor_parallel import REGISTRY

if __name__ == "__main__":
    sys.exit(train_from_command_line("Train a model on a mesh: its layers are cut over ranks, too.", REGISTRY))
