"""`--nsys`: each profiled rank runs under `nsys profile`, which captures its profile windows.

A rank that `torchrun` has started replaces itself by nsys, which starts it again. So the flag works wherever the run
does, and each rank gets a report of its own. A rank that is under nsys already stays as it is.
"""

import os
import shutil
import sys
import time
from pathlib import Path

from ddp_lab.runtime.config import RunConfig, choice_folder
from ddp_lab.runtime.errors import UserError

SESSION, STARTED_HERE = "NSYS_PROFILING_SESSION_ID", "DDP_LAB_UNDER_NSYS"
"""nsys sets the first for what it runs. The second says that this project has started it."""


def continue_under_nsys(config: RunConfig) -> None:
    """Restart this process under nsys if `config` wants that and it is not there yet.

    Raises:
        UserError: there is no nsys, or no folder for its report.
    """
    rank = int(os.environ.get("RANK", "-1"))
    if rank < 0 or not config.nsys or not config.profiles(rank) or {SESSION, STARTED_HERE} & os.environ.keys():
        return
    nsys = find_nsys()
    folder = choice_folder(config) / f"rank_{rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output-dir {config.output_dir}: cannot write to {folder}: {error.strerror}") from error
    report = folder / time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    os.environ[STARTED_HERE] = "1"
    os.execv(nsys, [nsys, *nsys_arguments(report, config.profile_repeat), sys.executable, *sys.orig_argv[1:]])


def find_nsys() -> str:
    """The path of nsys.

    Raises:
        UserError: it is not on PATH.
    """
    nsys = shutil.which("nsys")
    if nsys is None:
        raise UserError(
            "--nsys: there is no nsys on PATH; install Nsight Systems (developer.nvidia.com/nsight-systems), or add "
            "its folder to PATH"
        )
    return nsys


def nsys_arguments(report: Path, windows: int) -> list[str]:
    """To capture kernels, NVTX ranges and system calls from `cudaProfilerStart` to `cudaProfilerStop`.

    Args:
        report: Path without the suffix `.nsys-rep`. nsys numbers the reports of several windows.
    """
    ends = "stop" if windows == 1 else f"repeat:{windows}"  # by default nsys would end the process too
    return [
        "profile",
        f"--output={report}",
        "--trace=cuda,nvtx,osrt",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        f"--capture-range-end={ends}",
    ]
