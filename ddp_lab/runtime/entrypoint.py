"""The body of main_ddp.py, main_shard.py and main_parallel.py. What a run does is in `ddp_lab.runtime.run`."""

import gc
import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext

from ddp_lab.runtime.early import begin
from ddp_lab.runtime.flags import parse_config
from ddp_lab.runtime.process.environment import prepare_process
from ddp_lab.runtime.process.launcher import adopt_launcher
from ddp_lab.runtime.process.output import guard_output
from ddp_lab.runtime.watch.phases import long_phases_said
from ddp_lab.strategy.registry import Registry


def train_from_command_line(
    description: str,
    registry: Registry,
    aliases: Sequence[str] = (),
    arguments: Sequence[str] | None = None,
    prog: str | None = None,
) -> int:
    """Train as the command line says (`parse_config`), in this rank, and return the exit code."""
    if arguments is None:
        guard_output(goes_on=True)
    adopt_launcher(os.environ)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback; the watcher answers it later
    config = begin(parse_config(description, registry, aliases, arguments, prog), arguments)
    prepare_process()
    gc.disable()  # until training begins: what imports make stays, and looking through it takes a sixth of their time
    with long_phases_said(config.label) if os.environ.get("RANK") == "0" else nullcontext():
        from torch.distributed.elastic.multiprocessing.errors import record

        from ddp_lab.runtime.run import run  # imports torch, which --help does without

        gc.freeze()  # nor do later collections look through it
        code = record(run)(config, registry.load, registry.load_parallelize)
        gc.unfreeze()  # or extensions say that their functions leak
    return code or 0  # torchrun shows the traceback of an unforeseen error
