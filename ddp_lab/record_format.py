"""What those who write run records and those who read them must agree on (`docs/run-record.md`)."""

import re

from ddp_lab.runtime.errors import UserError

RECORD_VERSION = 10
"""Version of the format."""
SHARED_GPU = "step times tell about overlap and order, not about as many GPUs as ranks"
"""Behind a record's `gpu_sharing`."""
PART = re.compile("([0-9]{1,6})(?:-([0-9]{1,6}))?$")


def ranks_in(text: str, flag: str) -> frozenset[int]:
    """The ranks that `text` names, as a person writes them: `0,1,8` or `0-3,8`.

    Raises:
        UserError: it is no such list; names `flag`.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = PART.match(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UserError(
                f"{flag} {text}: '{part.strip()}' is neither a rank nor a range; write it like 0,1,8 or 0-3"
            )
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)
