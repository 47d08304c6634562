"""More process groups of the same ranks, for collectives that must not wait for each other.

Gloo has one connection for each pair of ranks in a group, and sends only what the receiver has announced. With a single
group, a rank that is late announces behind its own data, and the two directions take turns. So each rank is the root of
a group of its own.
"""

from collections import Counter
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddp_lab.runtime.groups import description

_device_types_of_gloo: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group sends tensors of this device through Gloo."""
    types = _device_types_of_gloo.get(group)
    if types is None:
        backends = (entry.split(":") for entry in dist.get_backend_config(group).split(","))
        types = _device_types_of_gloo[group] = {kind for kind, backend in backends if backend == "gloo"}
    return device.type in types


_made_of: Counter[str] = Counter()


def another_group(group: dist.ProcessGroup, backend: str, timeout: timedelta | None, what: str) -> dist.ProcessGroup:
    """A new group of the same ranks, which these ranks alone make. Collective.

    `new_group` names such a group after a count of the groups that this process has made. Counts differ where one rank
    has joined a group that another has not, and ranks that look for each other under two names never meet. So the
    count is lent a number that all members know: `group`'s name, and how many groups were made of it.
    """
    name, count = group.group_name, c10d._world.group_count
    _made_of[name] += 1
    c10d._world.group_count = int.from_bytes(f"{name} {_made_of[name]}".encode())
    try:
        ranks = dist.get_process_group_ranks(group)
        of = description(group)
        made = dist.new_group(
            ranks, timeout, backend, use_local_synchronization=True, group_desc=f"{of}, {what}" if of else what
        )
    finally:
        c10d._world.group_count = count
    assert isinstance(made, dist.ProcessGroup), "this rank is a member"
    return made


_groups_of_roots: WeakKeyDictionary[dist.ProcessGroup, list[dist.ProcessGroup]] = WeakKeyDictionary()


def groups_of_roots(group: dist.ProcessGroup, device: torch.device) -> list[dist.ProcessGroup]:
    """For each rank, a group of the same ranks that carries only what this rank sends. Collective when first called."""
    if group not in _groups_of_roots:
        ranks, timeout = dist.get_process_group_ranks(group), group._get_backend(device).options._timeout
        _groups_of_roots[group] = [another_group(group, "gloo", timeout, f"root {rank}") for rank in ranks]
    return _groups_of_roots[group]


_side_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def side_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A group of the same ranks for small collectives that must not wait for an `all_gather` under way. Collective when
    first called.

    NCCL runs the collectives of a group one after the other, on whatever streams. Over Gloo `group` itself will do,
    because each root has a group of its own.
    """
    if is_gloo(group, device):
        return group
    if group not in _side_groups:
        options = group._get_backend(device).options
        timeout = None if options is None else options._timeout  # torch's `fake` group has none
        _side_groups[group] = another_group(group, dist.get_backend_config(group), timeout, "side")
    return _side_groups[group]
