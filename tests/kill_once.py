"""`torchrun ... kill_once.py SCRIPT [flags]`: a training run of which one rank is killed once.

`KILL_RANK` is killed when it has made `KILL_STEP` optimizer steps, if torchrun has not started the ranks again before.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> None:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == os.environ["KILL_RANK"]:
        from training import run

        def dying(strategy, steps, *arguments):  # type: ignore[no-untyped-def]
            def until_the_end():  # type: ignore[no-untyped-def]
                for done, step in enumerate(steps):
                    if done == int(os.environ["KILL_STEP"]):
                        os.kill(os.getpid(), signal.SIGKILL)
                    yield step

            return original(strategy, until_the_end(), *arguments)

        original, run.train = run.train, dying
    sys.argv = sys.argv[1:]
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")


if __name__ == "__main__":
    main()
