"""`ip` and `tc` of iproute2, on which the lab stands."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence

from training.errors import UserError


class RefusedError(UserError):
    """`ip` or `tc` refused; `said` is their word for it alone, without the command."""

    def __init__(self, command: Sequence[str], said: str) -> None:
        super().__init__(f"{' '.join(command)}: {said}")
        self.said = said


def require_tools() -> None:
    """Raises:
    UserError: this is not Linux, not root, or iproute2 is missing.
    """
    if platform.system() != "Linux":
        raise UserError(f"the link lab needs Linux's network namespaces; this is {platform.system()}")
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise UserError(f"the link lab needs {' and '.join(missing)}; install iproute2, e.g. apt-get install iproute2")
    if os.geteuid() != 0:
        raise UserError("the link lab makes network namespaces, for which it must be root; run it with sudo")


def ip(*arguments: str, check: bool = True) -> str:
    """Raises:
    RefusedError: `ip` or the kernel refuses.
    """
    return run("ip", *arguments, check=check)


def tc(*arguments: str, check: bool = True) -> str:
    """Raises:
    RefusedError: `tc` or the kernel refuses.
    """
    return run("tc", *arguments, check=check)


def run(*command: str, check: bool = True) -> str:
    answer = subprocess.run(command, capture_output=True, text=True)
    if check and answer.returncode:
        said = " ".join(answer.stderr.partition("Usage:")[0].split())
        raise RefusedError(command, said or f"exit code {answer.returncode}")
    return answer.stdout
