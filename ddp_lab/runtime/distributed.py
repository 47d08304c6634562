"""Joining and leaving the process group of the ranks that `torchrun` has started, and work that not every rank does."""

import datetime
import gc
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from ddp_lab.record_format import SHARED_GPU
from ddp_lab.runtime import share_gpu
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import OneRankError, UserError
from ddp_lab.runtime.groups import host_barrier, on_every_rank, told_through
from ddp_lab.runtime.link.group import paced_groups
from ddp_lab.runtime.link.speed import NONE, Nodes, SimulatedLink
from ddp_lab.runtime.mesh import TENSOR, Mesh, MeshGroups, mesh_groups
from ddp_lab.runtime.process.launcher import adopt_launcher, local_ranks, require_launcher
from ddp_lab.runtime.settings.mesh import LEGACY_NCCL, NCCL
from ddp_lab.strategy.options import AUTO

Result = TypeVar("Result")


@dataclass(frozen=True)
class RankContext:
    """This process among all. `backend` is as on the command line; `gpu_sharing` as the run record has it."""

    rank: int
    world_size: int
    device: torch.device
    backend: str
    groups: MeshGroups | None = None
    gpu_sharing: str | None = None

    @property
    def data_rank(self) -> int:
        """The number of this rank among those that see different samples."""
        return self.groups.mesh.data_rank(self.rank) if self.groups else self.rank

    @property
    def drawing_rank(self) -> int:
        """The number of this rank among those that draw random numbers of their own. Ranks of tp draw the same."""
        return self.rank // self.groups.mesh.degree(TENSOR) if self.groups else self.rank

    @property
    def data_size(self) -> int:
        return self.groups.mesh.data_size if self.groups else self.world_size

    @property
    def library(self) -> str:
        """What carries the messages: `gloo` or `nccl`."""
        return library_of(self.backend)

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def library_of(backend: str) -> str:
    """`nccl` for both of torch's NCCL backends, otherwise `gloo`."""
    return NCCL if backend in (NCCL, LEGACY_NCCL) else "gloo"


def group_config(backend: str) -> str:
    """What torch's functions that make a process group take as `backend`.

    With NCCL, CPU tensors go over Gloo, so that small exchanges do not make the host wait for the device.
    """
    return f"cpu:gloo,cuda:{backend}" if library_of(backend) == NCCL else backend


def backend_class(group: dist.ProcessGroup, device: torch.device) -> str:
    """The class that carries `group`'s tensors on `device`, such as `ProcessGroupGloo` or `ProcessGroupNCCL2`."""
    backend = group._get_backend(device)
    return type(getattr(backend, "wrapped_pg", backend)).__name__  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it


def has_two_nccl_classes(config: RunConfig) -> bool:
    """Whether a run with `config` gets torch's newer NCCL class, so that the older one is another."""
    is_default = config.backend in (AUTO, NCCL) and config.device != "cpu"
    return is_default and torch.cuda.is_available() and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"


def choose_device_and_backend(config: RunConfig) -> tuple[torch.device, str]:
    """The device of this rank, and its backend: what the flags say, or CUDA and NCCL if there is a GPU."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise UserError("--device cuda: torch sees no CUDA device here; use --device cpu, or check nvidia-smi")
    use_cuda = has_cuda if config.device == "auto" else config.device == "cuda"
    if config.link != NONE:
        flag = f"--link {config.link}"
        if use_cuda:
            raise UserError(f"{flag} slows down Gloo between CPUs, and this run is on GPUs; add --device cpu")
        size = os.environ["WORLD_SIZE"]
        if os.environ.get("LOCAL_WORLD_SIZE", size) != size:
            raise UserError(f"{flag} is for the ranks of one machine; several nodes have links of their own")
    backend = config.backend if config.backend != AUTO else NCCL if use_cuda else "gloo"
    if library_of(backend) == NCCL and not use_cuda:
        raise UserError(f"--backend {backend} needs CUDA devices; use --backend gloo")
    if not use_cuda:
        return torch.device("cpu"), backend
    ranks, gpus = local_ranks(), torch.cuda.device_count()
    is_shared = config.share_gpu or library_of(backend) != NCCL
    if ranks > gpus > 1 and not is_shared:  # who sees a single one: `require_own_gpus`
        raise UserError(
            f"{ranks} ranks on this node but only {gpus} GPUs, and NCCL takes one rank a GPU; use "
            f"--nproc_per_node={gpus}, or --share-gpu or --backend gloo to share GPUs"
        )
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus), backend


def require_own_gpus(gpus: Sequence[str]) -> None:
    """Refuse two ranks with the same GPU. SLURM may show each rank a single one (`--gpus-per-task=1`), which is then
    number 0 of each. `gpus`: by rank, what identifies its GPU."""
    for gpu in gpus:
        ranks = [str(rank) for rank, rank_gpu in enumerate(gpus) if rank_gpu == gpu]
        if len(ranks) > 1:
            raise UserError(
                f"ranks {', '.join(ranks)} see only one GPU, the same ({gpu}), and NCCL takes one rank a GPU; start "
                "one rank on its node, show each rank another GPU, or use --share-gpu or --backend gloo to share it"
            )


def joined(config: RunConfig) -> RankContext:
    """Make the default process group. Collective."""
    adopt_launcher(os.environ)  # the entrypoints have done it; benchmarks come here first
    require_launcher(os.environ)
    timeout = datetime.timedelta(minutes=config.timeout_minutes)
    met, turns, sharing = None, "", None
    if share_gpu.shares(config, local_ranks()):  # before CUDA is touched, as `choose_device_and_backend` does
        met = meet(timeout)
        turns = share_gpu.begin(met[0], over_nccl=config.backend != "gloo")
    device, backend = choose_device_and_backend(config)
    store, rank, size = met or meet(timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        own_gpu = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
        rows = [row.split("\n") for row in told_through(store, "gpu", rank, size, f"{own_gpu}\n{turns}")]
        gpus, turns = [gpu for gpu, _ in rows], max(why for _, why in rows)
        if library_of(backend) == NCCL and not config.share_gpu:
            require_own_gpus(gpus)
        sharing = share_gpu.described(gpus, turns if config.share_gpu else None)
    dist.init_process_group(group_config(backend), store=store, rank=rank, world_size=size, timeout=timeout)
    if rank == 0 and sharing:
        in_turns = f" ({turns}; {share_gpu.COST_OF_TURNS})" if turns else ""
        print(f"{sharing}{in_turns}: {SHARED_GPU}", flush=True)
    elif rank == 0 and config.share_gpu:
        why = "each rank has a GPU of its own" if device.type == "cuda" else "no GPU here; ranks share the CPU anyway"
        print(f"--share-gpu: {why}", flush=True)
    return RankContext(rank, size, device, backend, gpu_sharing=sharing)


def meet(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(current_attempt(), store), rank, size


@contextmanager
def joined_ranks(config: RunConfig) -> Iterator[RankContext]:
    """Within this context the default process group exists."""
    try:
        ranks = joined(config)
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise OneRankError(
            f"rank {os.environ['RANK']} cannot join the others: {reason}; ddp-lab doctor --live looks into it"
        ) from error
    try:
        nodes = Nodes.of(config.nodes, config.outer_link, ranks.world_size)
        with paced_groups(SimulatedLink.parse(config.link), nodes):
            yield ranks
            gc.collect()  # a group that Work handles or hooks still hold is not destroyed reliably
            host_barrier()
    finally:
        gc.collect()
        dist.destroy_process_group()


@contextmanager
def meshed(ranks: RankContext, text: str | None) -> Iterator[RankContext]:
    """Within this context `ranks` have the groups of the mesh that `--mesh` names. Collective."""
    if text is None:
        yield ranks
        return
    mesh, per_node = Mesh.parse(text), int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    mesh.require_ranks(ranks.world_size, per_node)
    if ranks.is_main:
        print(mesh.picture(per_node), flush=True)
    is_shared = ranks.gpu_sharing is not None and ranks.library == NCCL
    with mesh_groups(mesh, ranks.device.type, share_gpu.PARTS_HANG if is_shared else "") as groups:
        yield replace(ranks, groups=groups)


def current_attempt() -> str:
    """What tells the keys of this attempt from those of an earlier one in the same store.

    Ranks that `torchrun` restarts get the old store, which still has the addresses of the dead ranks. Not so with
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which elastic jobs need: a node that has just joined counts its restarts anew.
    """
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if is_shared else 'of a store of its own'}"


def node_leader_first(make: Callable[[], Result]) -> Result:
    """Run `make` on one rank of each node, then on the others, which find its files in the cache. Collective."""
    leads = os.environ["LOCAL_RANK"] == "0"
    result = on_every_rank(make if leads else lambda: None)
    followers = on_every_rank(make if not leads else lambda: None)
    return result if leads else followers  # type: ignore[return-value]
