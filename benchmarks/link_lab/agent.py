"""`torchrun` on one node, which writes to a file which ranks failed and how, instead of saying so at length.

python -m benchmarks.link_lab.agent FAILURES.json [arguments of torchrun]
"""

import json
import logging
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main() -> int:
    logging.disable(logging.ERROR)
    try:
        torchrun(sys.argv[2:])
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exitcode": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        Path(sys.argv[1]).write_text(json.dumps(failures))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
