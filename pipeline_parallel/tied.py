"""A weight that the first and the last stage share: an embedding that is the head, too, or a block that stands in both.

The first stage has the parameter: it trains there, and counts there once, in norms, shards and checkpoints. The last
stage has a copy. What backward adds up for the copy goes to the first stage at the end of a step, which adds it to its
own before it is reduced over ranks with other samples. Before a step, the copy gets the new values.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError, listed
from pipeline_parallel.channels import Channels, Receipt
from pipeline_parallel.partition import Chain

Shared = dict[nn.Parameter, list[str]]
"""Parameters that the first and the last stage share: their names, that of the first stage first."""


def shared_of(chain: Chain, places: Sequence[int]) -> Shared:
    """
    Raises:
        UnsupportedError: other stages share one.
    """
    found: dict[nn.Parameter, dict[str, int]] = defaultdict(dict)
    for (name, part), stage in zip(chain, places, strict=True):
        for own, tensor in part.state_dict(keep_vars=True).items():
            if isinstance(tensor, nn.Parameter) or own.endswith("num_batches_tracked"):  # other buffers may be constant
                found[tensor][f"{name}.{own}"] = stage
    shared = {tensor: held for tensor, held in found.items() if len(set(held.values())) > 1}
    for tensor, held in shared.items():
        if set(held.values()) != {0, places[-1]} or not isinstance(tensor, nn.Parameter):
            at = listed(sorted(set(held.values())))
            raise UnsupportedError(
                f"--mesh with pp: {listed(list(held))} are one tensor of stages {at}, but the first and the last stage "
                "alone may share one, a parameter; untie it, or put them into one stage (--plan, split=)"
            )
    return {parameter: list(held) for parameter, held in shared.items()}


class Tied:
    """On the first or the last rank of a pipeline.

    Args:
        tensors: The parameters on the first rank, their copies on the last, in one order.
    """

    def __init__(self, tensors: Sequence[Tensor], channels: Channels, is_first: bool) -> None:
        self._values = channels["tied value", "out" if is_first else "in"]
        self._gradients = channels["tied gradient", "in" if is_first else "out"]
        self._tensors, self._is_first = list(tensors), is_first
        self._trained = {index: tensor for index, tensor in enumerate(tensors) if tensor.requires_grad}
        self._receipts: dict[Tensor, Receipt] = {}
        self.adds = False  # the backward pass that runs is the last one of its stage
        for tensor in self._trained.values() if is_first else ():
            tensor.register_post_accumulate_grad_hook(self._add)

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the copies up to date. Both ranks call it, when the parameters are."""
        for index, tensor in enumerate(self._tensors):
            if self._is_first:
                self._values.send(index, tensor)
            else:
                tensor.data = self._values.receive(index).tensor()

    def sizes(self) -> tuple[list[int], list[int]]:
        """Bytes of each message of a step: values, and gradients."""
        return [self._values.nbytes(n) for n in range(len(self._tensors))], [
            *map(self._gradients.nbytes, self._trained)
        ]

    def begin(self) -> None:
        """A step begins."""
        if self._is_first:
            self._receipts = {tensor: self._gradients.receive(index) for index, tensor in self._trained.items()}

    def add_rest(self) -> None:
        """Backward of the first stage is over: what got no gradient there gets the copy's."""
        for tensor in list(self._receipts):
            torch.autograd.backward([tensor], [torch.zeros_like(tensor)])

    def end(self) -> None:
        """All of backward is done."""
        for index, tensor in self._trained.items() if not self._is_first else ():
            self._gradients.send(index, torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
            tensor.grad = None

    def _add(self, parameter: Tensor) -> None:
        """In front of all that a strategy does with the gradient."""
        if self.adds and parameter in self._receipts:
            assert parameter.grad is not None
            parameter.grad.add_(self._receipts.pop(parameter).tensor())


def tie(shared: Shared, module: nn.Module, channels: Channels, rank: int, ranks: int) -> Tied | None:
    """Put copies in the place of parameters on the last rank of a pipeline. None on ranks that have neither.

    Args:
        shared: Of the whole model.
    """
    if not shared or 0 < rank < ranks - 1:
        return None
    if rank == 0:
        return Tied(list(shared), channels, is_first=True)
    copies = {parameter: parameter.detach().clone().requires_grad_(parameter.requires_grad) for parameter in shared}
    for layer in module.modules():
        for own, parameter in list(layer._parameters.items()):
            if parameter in copies:
                del layer._parameters[own]
                setattr(layer, own, copies[parameter])
    return Tied(list(copies.values()), channels, is_first=False)
