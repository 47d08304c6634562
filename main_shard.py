"""Train with one sharded strategy: torchrun --standalone --nproc_per_node=2 main_shard.py --ddp-choice zero3"""

import sys

from ddp_lab.runtime.entrypoint import train_from_command_line
from sharding import REGISTRY

if __name__ == "__main__":
    sys.exit(
        train_from_command_line("Train a model with one sharded (ZeRO) strategy.", REGISTRY, aliases=["--shard-choice"])
    )
