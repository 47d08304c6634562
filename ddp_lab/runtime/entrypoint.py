"""The way in of main_ddp.py, main_shard.py, main_parallel.py and `ddp-lab train`: from a command line to settings that
the ranks can train with, and from these to `ddp_lab.runtime.run`.

Imports nothing heavy: what can be wrong is said before torch is imported, which takes seconds.
"""

import gc
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from ddp_lab.runtime.cli import exit_with_error
from ddp_lab.runtime.config import RunConfig, checkpoint_folder
from ddp_lab.runtime.data.found import require_found
from ddp_lab.runtime.data.workloads import resolve_workload
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.flags import gives, parse_config, with_config_file
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.process.environment import guard_output, prepare_process, sees_gpu
from ddp_lab.runtime.process.launcher import adopt_launcher, require_launcher
from ddp_lab.runtime.settings.field import AUTO
from ddp_lab.runtime.settings.training import LATEST
from ddp_lab.runtime.watch.phases import long_phases_said
from ddp_lab.strategy.registry import Registry

BATCH = "--global-batch-size"
MOST_RANKS_OF_CORE = 16
"""More are no training that anybody means."""
OPEN_FILES, OPEN_FILES_OF_RANK = 64, 8
"""A rank of two needs 49 to 64; for each other rank it has a few connections in each process group."""


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
    config = parse_config(description, registry, aliases, arguments, prog)
    return train(configured(config, arguments), registry)


def train(config: RunConfig, registry: Registry) -> int:
    """Train in this rank, with settings that are `configured`, and return the exit code."""
    prepare_process()
    gc.disable()  # until training begins: what imports make stays, and looking through it takes a sixth of their time
    with long_phases_said(config.label) if os.environ.get("RANK") == "0" else nullcontext():
        from torch.distributed.elastic.multiprocessing.errors import record

        from ddp_lab.runtime.run import run  # imports torch, which --help does without

        gc.freeze()  # nor do later collections look through it
        code = record(run)(config, registry.load, registry.load_parallelize)
        gc.unfreeze()  # or extensions say that their functions leak
    return code or 0  # torchrun shows the traceback of an unforeseen error


def configured(config: RunConfig, arguments: Sequence[str] | None = None, ranks: int = 0) -> RunConfig:
    """The settings of the command line, as the ranks can train with them, after the first line of a run. Exits with one
    line where they cannot. If no batch is given, ranks among which the default does not divide get the nearest that
    does. `ranks`: so many are to be started on this node; default: this process is one of them."""
    environ, is_started_by_us = os.environ, not ranks and arguments is not None
    try:
        if ranks:
            size = on_node = ranks
            require_room(size)
        else:
            require_launcher(environ)
            size = int(environ["WORLD_SIZE"])
            on_node = int(environ.get("LOCAL_WORLD_SIZE", size))
        # ranks, and the batch that divides among them
        if config.mesh:
            Mesh.parse(config.mesh).require_ranks(size, on_node)
        seeing, samples = config.data_size(size), config.global_batch_size
        if not gives(with_config_file(sys.argv[1:] if arguments is None else arguments), BATCH):
            config = replace(config, global_batch_size=config.nearest_batch(seeing))
        config.micro_batch_size(seeing)
        config.require_profiled_ranks(size)
        # what is named is there
        on_gpu = config.device != "cpu" and sees_gpu()
        resolved = resolve_workload(config, on_gpu)
        require_found(resolved)
        require_origin(config)
        require_folder(config)
    except UserError as error:
        exit_with_error(f"{config.label}: {error}")
    # the first line of a run
    if environ.get("RANK", "0") == "0" and not is_started_by_us:
        subject = f"{size} ranks" if size > 1 else "1 rank"
        subject += f" on {cores_here()} cores" * (size == on_node) + (" load" if size > 1 else " loads")
        where = "GPUs" if on_gpu else "the CPU"
        line = f"{config.label}: {subject} torch, to train workload {resolved.workload} on {where}"
        if config.global_batch_size != samples:
            line += f"; {BATCH} is {config.global_batch_size}, since {samples} does not divide among them"
        print(line, flush=True)
    return config


def ranks_here(config: RunConfig) -> int:
    """How many ranks to start on this node where nobody says: one for each GPU, else those of the mesh, or 2."""
    if config.device == "cpu" or not sees_gpu():
        return Mesh.parse(config.mesh).size if config.mesh else 2
    import torch  # takes seconds

    return torch.cuda.device_count() or 2


def require_room(ranks: int) -> None:
    """Refuse more ranks than this node has cores or open files for."""
    cores, open_files = cores_here(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if ranks > MOST_RANKS_OF_CORE * cores:
        most = f"{MOST_RANKS_OF_CORE * cores}, {MOST_RANKS_OF_CORE} a core"
        raise UserError(f"{ranks} ranks on {cores} cores: must be at most {most}")
    least = OPEN_FILES + OPEN_FILES_OF_RANK * ranks
    if open_files != resource.RLIM_INFINITY and open_files < least:
        need = f"each of {ranks} ranks may need {least}"
        raise UserError(f"a process may open {open_files} files, and {need}; raise ulimit -n")


def cores_here() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def require_origin(config: RunConfig) -> None:
    """Refuse to resume where there is no checkpoint. Whether it is whole is seen later."""
    may_have_own = config.checkpoint_every and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if config.resume in (None, AUTO) or may_have_own:
        return
    folder = checkpoint_folder(config) if config.resume == LATEST else Path(str(config.resume))
    if not (folder / "manifest.json").exists() and not any(folder.glob("step_*")):
        raise UserError(f"--resume: no checkpoint in {folder}; leave --resume out to start from the beginning")


def require_folder(config: RunConfig) -> None:
    """Refuse a folder that traces cannot be written to, as far as the next folder above shows."""
    folder = Path(config.output_dir).expanduser().absolute()
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"--output-dir {config.output_dir}: cannot write to {above}")
