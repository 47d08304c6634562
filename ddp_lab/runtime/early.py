"""Mistakes that are found before torch is imported, which takes seconds, and the line that a run begins with.

Imports nothing heavy.
"""

import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddp_lab.runtime.cli import exit_with_error
from ddp_lab.runtime.config import RunConfig, checkpoint_folder
from ddp_lab.runtime.data.found import require_found
from ddp_lab.runtime.data.workloads import resolve_workload
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.process.environment import sees_gpu
from ddp_lab.runtime.process.launcher import require_launcher
from ddp_lab.runtime.settings.checkpoints import LATEST
from ddp_lab.runtime.settings.file import with_config_file
from ddp_lab.strategy.options import AUTO

BATCH = "--global-batch-size"
MOST_RANKS_OF_CORE = 16
"""More are no training that anybody means."""
OPEN_FILES, OPEN_FILES_OF_RANK = 64, 8
"""A rank of two needs 49 to 64; for each other rank it has a few connections in each process group."""


def begin(config: RunConfig, arguments: Sequence[str] | None, ranks: int | None = None) -> RunConfig:
    """`config` as the ranks can train with it. Exits with one line where they cannot. Prints the first line of a run.

    Args:
        arguments: The command line (default: this process's). If it gives no batch, ranks among which the default does
            not divide get the nearest that does.
        ranks: Of this node, which are to be started. Default: this process is one of them.
    """
    environ, begun_by_us = os.environ, ranks is None and arguments is not None
    try:
        if ranks is None:
            require_launcher(environ)
        size = ranks or int(environ["WORLD_SIZE"])
        if ranks is not None:
            require_room(ranks)
        mesh = Mesh.parse(config.mesh) if config.mesh else None
        if mesh:
            mesh.require_ranks(size, ranks or int(environ.get("LOCAL_WORLD_SIZE", size)))
        seeing, samples = mesh.data_size if mesh else size, config.global_batch_size
        given = with_config_file(sys.argv[1:] if arguments is None else arguments)
        if not any(one.partition("=")[0] == BATCH for one in given):
            config = replace(config, global_batch_size=config.nearest_batch(seeing))
        config.micro_batch_size(seeing)
        config.require_profiled_ranks(size)
        on_gpu = config.device != "cpu" and sees_gpu()
        resolved = resolve_workload(config, on_gpu)
        require_found(resolved)
        require_origin(config)
        require_folder(config)
    except UserError as error:
        exit_with_error(f"{config.label}: {error}")
    if environ.get("RANK", "0") == "0" and not begun_by_us:
        is_node = size == (ranks or int(environ.get("LOCAL_WORLD_SIZE", 0)))
        who = f"{size} ranks" if size > 1 else "1 rank"
        who += f" on {cores_here()} cores" * is_node + (" load" if size > 1 else " loads")
        where = "GPUs" if on_gpu else "the CPU"
        line = f"{config.label}: {who} torch, to train workload {resolved.workload} on {where}"
        if config.global_batch_size != samples:
            line += f"; {BATCH} is {config.global_batch_size}, since {samples} does not divide among them"
        print(line, flush=True)
    return config


def require_room(ranks: int) -> None:
    """Check that this node may have so many.

    Raises:
        UserError: it has too few cores, or a process may open too few files.
    """
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
    """Check that there may be a checkpoint where the run is to resume from. Whether it is whole is seen later.

    Raises:
        UserError: there is none.
    """
    may_have_own = config.checkpoint_every and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if config.resume in (None, AUTO) or may_have_own:
        return
    folder = checkpoint_folder(config) if config.resume == LATEST else Path(str(config.resume))
    if not (folder / "manifest.json").exists() and not any(folder.glob("step_*")):
        raise UserError(f"--resume: no checkpoint in {folder}; leave --resume out to start from the beginning")


def require_folder(config: RunConfig) -> None:
    """Check that the run may write where its traces go, as far as the next folder above shows.

    Raises:
        UserError: it may not.
    """
    folder = Path(config.output_dir).expanduser().absolute()
    above = next(one for one in (folder, *folder.parents) if one.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"--output-dir {config.output_dir}: cannot write to {above}")
