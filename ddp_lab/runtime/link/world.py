"""Pacing all process groups of a run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ddp_lab.runtime.groups import from_rank0, on_every_rank
from ddp_lab.runtime.link.group import PacedGroup, replace_default
from ddp_lab.runtime.link.ledger import Ledger, make_file
from ddp_lab.runtime.link.speed import Link, Nodes


@contextmanager
def paced_groups(link: Link | None, nodes: Nodes | None = None) -> Iterator[None]:
    """Within this context the default process group, and all that are made of it, are paced; not if `link` is None.

    Collective.

    Args:
        nodes: With a link of its own for what goes between nodes. Default: `link` carries all.
    """
    inner = dist.group.WORLD
    if link is None or inner is None:
        yield
        return
    paced = PacedGroup(inner, range(inner.size()), shared_ledger(inner, link, nodes))
    replace_default(inner, paced)
    try:
        yield
    finally:
        paced.end_delivery()
        replace_default(paced, inner)


def shared_ledger(group: dist.ProcessGroup, link: Link, nodes: Nodes | None) -> Ledger:
    """The ledger of the default group's ranks. Collective.

    Raises:
        UserError: a rank cannot open it.
    """
    path = from_rank0(lambda: make_file(group.size()))
    try:
        return on_every_rank(lambda: Ledger(path, group.size(), link, nodes))
    finally:
        if group.rank() == 0:
            path.unlink()  # those who have it open keep it
