"""Training with states larger than the memory that a process may use, by `--offload parameters:FOLDER`.

    sudo python benchmarks/offload_files.py --folder /fast/disk

One rank of `zero3` joins a memory cgroup and trains a stack of linear layers. Its states take `--times` as much as the
cgroup's limit: 16 bytes a parameter with AdamW. Without the flag the kernel would kill it. A cgroup needs root.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.runtime.cli import OneLineParser, at_least, exit_with_error

GIB = 2**30
WIDTH, STATES_BYTES = 4096, 16
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on a disk, for the files of the states")
    parser.add_argument("--limit-gib", type=at_least(1, float), default=3.0, help="of the cgroup (default: 3 GiB)")
    parser.add_argument("--times", type=at_least(0.5, float), default=3.0, help="states over limit (default: 3)")
    parser.add_argument("--steps", type=at_least(1), default=3, help="optimizer steps (default: 3)")
    return parser.parse_args(arguments)


@contextmanager
def limited(limit_bytes: int) -> Iterator[None]:
    """Within this context this process may use so much memory, page cache included. Leaves the process with one line
    where there can be no such cgroup."""
    parent, limit = (V1, "memory.limit_in_bytes") if V1.exists() else (V2, "memory.max")
    group = parent / f"ddp-lab-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        exit_with_error(f"no cgroup {group}: {error.strerror}; this takes root")
    try:
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def main() -> int:
    options = parse()
    layers = round(options.times * options.limit_gib * GIB / STATES_BYTES / WIDTH**2)
    with limited(int(options.limit_gib * GIB)):
        train(layers, options.folder, options.steps)
    return 0


def train(layers: int, folder: Path, steps: int) -> None:
    import torch
    import torch.distributed as dist

    import ddp_lab
    from ddp_lab.runtime.profiling.memory import peak_rss_bytes

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    options = ddp_lab.StrategyOptions(offload=f"parameters:{folder}")
    strategy = ddp_lab.load("zero3")(module, lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), options)
    for step in range(steps):
        begin = time.monotonic()
        with strategy.micro_batch():
            loss = strategy(torch.randn(8, WIDTH)).square().mean()
            loss.backward()
        strategy.step()
        strategy.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.4g}, {time.monotonic() - begin:.1f} s", flush=True)
    print(f"{layers * WIDTH**2 / 1e6:,.0f} M parameters")
    print(f"{strategy.host_bytes() / GIB:.2f} GiB of states in files; {peak_rss_bytes() / GIB:.2f} GiB resident")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
