"""A step of one rank: walks the list of actions, and does what each says."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from ddp_lab.runtime.errors import OneRankError
from ddp_lab.runtime.tensors import tensors_in
from pipeline_parallel.actions import Action, Kind, Shape, messages_of
from pipeline_parallel.channels import Channels, Receipt
from pipeline_parallel.split_backward import WeightGradients
from pipeline_parallel.stage import Stages
from pipeline_parallel.tied import Tied

Batch = Mapping[str, Tensor]
RunModel = Callable[..., Any]  # the whole model's forward pass, as a strategy runs it
LossOf = Callable[[int, Any], Tensor]  # of a micro-batch and what the model has answered: where backward begins
BackwardOf = Callable[[bool], AbstractContextManager[None]]  # of a backward pass; True: none follows in this stage
CHANNEL_OF = {
    Kind.SEND_ACTIVATION: ("activation", "out"),
    Kind.RECEIVE_ACTIVATION: ("activation", "in"),
    Kind.SEND_GRADIENT: ("gradient", "out"),
    Kind.RECEIVE_GRADIENT: ("gradient", "in"),
}


def form_of(batch: Any) -> Hashable:
    """What decides, with the stage, the form of the hidden states in front of it and behind it: known on both sides."""
    return tuple((tensor.dtype, tensor.shape) for tensor in tensors_in(batch))


class Pass(NamedTuple):
    """What a rank holds of one micro-batch in one stage, between forward and backward.

    Attributes:
        received: The hidden states from the stage before; None in the first stage.
        made: Where backward begins. It keeps the graph, but not the hidden states that were sent. None where nothing
            trains up to here.
        weights: With a backward pass in two, what is left of it.
    """

    received: Tensor | None
    made: Any
    weights: WeightGradients | None


class Walk:
    """A step over `batches`, as `actions` say."""

    def __init__(
        self,
        stages: Stages,
        channels: Channels,
        tied: Tied | None,
        shape: Shape,
        batches: Sequence[Batch],
        forward: RunModel,
        loss_of: LossOf,
        backward_of: BackwardOf,
    ) -> None:
        self._stages, self._channels, self._tied, self._shape = stages, channels, tied, shape
        self._batches, self._forward, self._loss_of, self._backward_of = batches, forward, loss_of, backward_of
        self._forms = [form_of(batch) for batch in batches]
        self._passes: dict[tuple[int, int], Pass] = {}
        self._left: dict[tuple[int, int], WeightGradients] = {}  # gradients of weights, by stage and micro-batch
        self._receipts: dict[Action, Receipt] = {}
        self._ready: dict[Action, Tensor] = {}  # by the action that sends it

    def run(self, actions: Sequence[Action], arrived: Mapping[Action, Sequence[Action]]) -> None:
        self._arrived = arrived  # what the other rank has used by then, by what it sends
        self._splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in actions)
        for action in actions:
            with in_profile(action):
                self._do(action)
        if self._stages.refusal is not None:  # all ranks see a loss that is not finite, and ask why
            device = next(iter(self._channels.values())).device
            self._loss_of(0, SimpleNamespace(loss=torch.full((), torch.nan, dtype=torch.float32, device=device)))

    def _do(self, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            self._run_forward(action)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            with self._backward(action):
                self._left.pop(action[1:]).compute()
        elif action.kind.computes:
            self._run_backward(action)
        else:
            self._communicate(action)

    def _communicate(self, action: Action) -> None:
        channel, key = self._channels[CHANNEL_OF[action.kind]], (action.stage, self._forms[action.micro_batch])
        if action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
            channel.send(key, self._ready.pop(action), action)
        else:
            self._receipts[action] = channel.receive(key)

    def _received(self, action: Action | None) -> Tensor | None:
        if action is None:
            return None
        with in_profile("wait", action):
            tensor = self._receipts.pop(action).tensor()
        for sent in self._arrived.get(action, ()):
            self._channels[CHANNEL_OF[sent.kind]].let_go(sent)
        return tensor

    def _run_forward(self, action: Action) -> None:
        _, stage, micro_batch = action
        received, sent = messages_of(action, self._shape)
        hidden = self._received(received)
        if hidden is not None:
            hidden.requires_grad_()
        weights, run = WeightGradients() if self._splits else None, partial(self._forward, **self._batches[micro_batch])
        behind = self._channels[CHANNEL_OF[sent.kind]] if sent else None
        with weights or nullcontext():
            answer = self._stages.attempt(stage, hidden, run, behind, (stage, self._forms[micro_batch]))
        made: Any = None
        if sent:
            made = torch.autograd.graph.get_gradient_edge(answer) if answer.requires_grad else None
            self._ready[sent] = answer.detach()
        elif answer is not None:
            made = self._loss_of(micro_batch, answer)
        self._passes[stage, micro_batch] = Pass(hidden, made, weights)

    def _run_backward(self, action: Action) -> None:
        received, sent = messages_of(action, self._shape)
        gradient = self._received(received)
        hidden, made, weights = self._passes.pop(action[1:])
        with self._backward(action), weights or nullcontext():
            if made is not None:
                try:
                    torch.autograd.backward([made], [gradient])
                except OneRankError as error:
                    self._stages.refuse(str(error))
        if sent:
            assert hidden is not None, "the first stage sends no gradient"
            self._ready[sent] = torch.full_like(hidden, torch.nan) if hidden.grad is None else hidden.grad
        if weights:
            self._left[action[1:]] = weights

    @contextmanager
    def _backward(self, action: Action) -> Iterator[None]:
        is_last = action.micro_batch + 1 == len(self._batches)  # stages take micro-batches in order
        if self._tied is not None:
            self._tied.adds = is_last
        with self._backward_of(is_last):
            yield
            if self._tied is not None and is_last and action.stage == 0 and action.kind is not Kind.BACKWARD_INPUT:
                self._tied.add_rest()


def in_profile(*what: Any) -> AbstractContextManager[Any]:
    """A range in the profile, which reports read: `pipeline F2.5`, and within it `pipeline wait RA2.5`."""
    return record_function(" ".join(map(str, ("pipeline", *what)))) if _profiler_enabled() else nullcontext()
