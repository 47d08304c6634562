"""Stores through which ranks meet, reachable only from this machine.

A `TCPStore` listens on every interface and has no authentication. torch has no setting for the interface, but accepts a
socket that listens already.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

LOOPBACK = "127.0.0.1"


class LoopbackStore(dist.TCPStore):
    """A `TCPStore` with the same arguments. The master listens on the loopback interface only."""

    def __init__(self, host_name: str, port: int, *, is_master: bool = False, **options: Any) -> None:
        if is_master:
            listener = socket.create_server((LOOPBACK, port))
            host_name, port = listener.getsockname()  # `localhost` may stand for ::1
            options["master_listen_fd"] = listener.detach()
        super().__init__(host_name, port, is_master=is_master, **options)


@contextmanager
def stores_on_loopback() -> Iterator[None]:
    """Within this context, the agent of `torchrun` in this process creates stores that only this machine can reach. Its
    `local_addr` must be `LOOPBACK`."""
    patched = partial(mock.patch.object, attribute="TCPStore", new=LoopbackStore)
    with patched(dist), patched(c10d_rendezvous_backend):  # where torchrun takes the class from
        yield
