"""Where torch keeps its process groups: taking one out, and giving its place to another."""

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import _unregister_process_group


def forget(group: dist.ProcessGroup) -> None:
    """Take `group` out, so that another can have its name."""
    world = c10d._world
    _unregister_process_group(group.group_name)
    for register in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        register.pop(group, None)
    for groups in world.tags_to_pg.values():
        if group in groups:
            groups.remove(group)


def replace_default(old: dist.ProcessGroup, new: dist.ProcessGroup) -> None:
    """Make `new` the default group in the place of `old`, whose name it has."""
    world = c10d._world
    (backend, store), config, ranks = world.pg_map[old], world.pg_backend_config[old], world.pg_group_ranks[old]
    forget(old)
    c10d._register_pg_in_world(new, backend, store, new.group_name, config, ranks, add_to_default_tag=True)
    c10d._update_default_pg(new)
