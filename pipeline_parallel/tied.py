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
    names_by_tensor: dict[nn.Parameter, dict[str, int]] = defaultdict(dict)
    for (name, part), stage in zip(chain, places, strict=True):
        for local_name, tensor in part.state_dict(keep_vars=True).items():
            # other buffers may be constant
            if isinstance(tensor, nn.Parameter) or local_name.endswith("num_batches_tracked"):
                names_by_tensor[tensor][f"{name}.{local_name}"] = stage
    shared = {tensor: names for tensor, names in names_by_tensor.items() if len(set(names.values())) > 1}
    for tensor, names in shared.items():
        if set(names.values()) != {0, places[-1]} or not isinstance(tensor, nn.Parameter):
            at = listed(sorted(set(names.values())))
            raise UnsupportedError(
                f"--mesh with pp: {listed(list(names))} are one tensor of stages {at}, but the first and the last "
                "stage alone may share one, a parameter; untie it, or put them into one stage (--plan, split=)"
            )
    return {parameter: list(names) for parameter, names in shared.items()}


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
        """Post the receives of a step."""
        if self._is_first:
            self._receipts = {tensor: self._gradients.receive(index) for index, tensor in self._trained.items()}

    def add_rest(self) -> None:
        """After backward of the first stage: a parameter without a gradient gets the copy's."""
        for tensor in list(self._receipts):
            torch.autograd.backward([tensor], [torch.zeros_like(tensor)])

    def end(self) -> None:
        """Send the copies' gradients, after all of backward."""
        for index, tensor in self._trained.items() if not self._is_first else ():
            self._gradients.send(index, torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
            tensor.grad = None

    def _add(self, parameter: Tensor) -> None:
        """Add the copy's gradient, before a strategy uses the sum."""
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
        for name, parameter in list(layer._parameters.items()):
            if parameter in copies:
                del layer._parameters[name]
                setattr(layer, name, copies[parameter])
    return Tied(list(copies.values()), channels, is_first=False)
