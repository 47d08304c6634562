"""Train with one replicated strategy: torchrun --standalone --nproc_per_node=2 main_ddp.py --ddp-choice simple_ddp"""

import os
import sys

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch is imported: no profiler noise where there is no GPU
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from ddp import REGISTRY
from training.cli import parse_config


def main() -> int:
    config = parse_config(
        "Train a model with one replicated (data-parallel) strategy, under torchrun.",
        REGISTRY.sentences,
        choice_flags=("--ddp-choice",),
        missing=REGISTRY.missing,
    )
    from training.run import run  # imports torch, which --help can do without

    return run(config, REGISTRY.load)


if __name__ == "__main__":
    sys.exit(main())
