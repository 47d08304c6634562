"""A step of one rank: walks the list of actions, and does what each says."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from pipeline_parallel.actions import Action, Kind, messages_of
from pipeline_parallel.channels import Form, Receipt, form_of
from pipeline_parallel.rank import PipelineRank
from pipeline_parallel.split_backward import WeightGradients

Batch = Mapping[str, Tensor]
RunModel = Callable[..., Any]
"""The whole model's forward pass, as a strategy runs it."""
LossOf = Callable[[int, Any], Tensor]
"""Of a micro-batch and what the model has answered: where backward begins."""
BackwardOf = Callable[[bool], AbstractContextManager[None]]
"""The context of a backward pass. Its argument: whether none follows in this stage."""


@dataclass
class Pass:
    """What a rank holds of one micro-batch in one stage, between forward and the end of backward.

    Attributes:
        received: The hidden states from the stage before; None in the first stage.
        made: Where backward begins. It keeps the graph, but not the hidden states that were sent.
        form: Of what was made, and so of its gradient.
        weights: With a backward pass in two, what is left of it.
    """

    received: Tensor | None
    made: Any
    form: Form
    weights: WeightGradients | None


class Walk:
    """A step over `batches`."""

    def __init__(
        self,
        pipeline: PipelineRank,
        batches: Sequence[Batch],
        forward: RunModel,
        loss_of: LossOf,
        backward_of: BackwardOf,
    ) -> None:
        self._pipeline, self._batches, self._forward = pipeline, batches, forward
        self._loss_of, self._backward_of = loss_of, backward_of
        self._shape, self._actions = pipeline.shape(len(batches)), pipeline.actions(len(batches))
        self._splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in self._actions)
        self._passes: dict[tuple[int, int], Pass] = {}
        self._expected: deque[Action] = deque()  # activations whose receive is not posted yet, in order
        self._receipts: dict[Action, Receipt] = {}
        self._ready: dict[Action, Tensor] = {}  # by the action that sends it

    def run(self) -> None:
        tied = self._pipeline.tied
        if tied is not None:
            tied.begin()
        do = {
            Kind.FORWARD: self._run_forward,
            Kind.BACKWARD: self._run_backward,
            Kind.BACKWARD_INPUT: self._run_backward,
            Kind.BACKWARD_WEIGHT: self._run_backward_weight,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECEIVE_ACTIVATION: self._receive_activation,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.RECEIVE_GRADIENT: self._receive_gradient,
        }
        for action in self._actions:
            with in_profile(action):
                do[action.kind](action)
        if tied is not None:
            tied.end()

    # Compute ---------------------------------------------------------------------------------------------------------

    def _run_forward(self, action: Action) -> None:
        _, stage, micro_batch = action
        received, sent = messages_of(action, self._shape)
        hidden = self._take(received).requires_grad_() if received else None
        weights, batch = WeightGradients() if self._splits else None, self._batches[micro_batch]
        with weights or nullcontext():
            answer = self._pipeline.stages.run(stage, hidden, lambda: self._forward(**batch))
        made: Any
        if sent:
            made = torch.autograd.graph.get_gradient_edge(answer) if answer.requires_grad else None
            self._ready[sent] = answer.detach()
        else:
            made = answer = self._loss_of(micro_batch, answer)
        self._passes[stage, micro_batch] = Pass(hidden, made, form_of(answer), weights)

    def _run_backward(self, action: Action) -> None:
        received, sent = messages_of(action, self._shape)
        one = self._passes[action.stage, action.micro_batch]
        gradient = self._take(received) if received else None
        with self._backward(action), one.weights or nullcontext():
            if one.made is not None:  # else nothing trains up to here
                torch.autograd.backward([one.made], [gradient])
        if sent:
            assert one.received is not None and one.received.grad is not None, "a block uses what it gets"
            self._ready[sent] = one.received.grad
        one.received = one.made = None
        if not self._splits:
            del self._passes[action.stage, action.micro_batch]

    def _run_backward_weight(self, action: Action) -> None:
        weights = self._passes.pop((action.stage, action.micro_batch)).weights
        assert weights is not None, "this schedule splits backward"
        with self._backward(action):
            weights.compute()

    def _backward(self, action: Action) -> AbstractContextManager[None]:
        is_last = action.micro_batch + 1 == len(self._batches)  # stages take micro-batches in order
        if self._pipeline.tied is not None:
            self._pipeline.tied.adds = is_last
        return self._backward_of(is_last)

    # Messages --------------------------------------------------------------------------------------------------------

    def _receive_activation(self, action: Action) -> None:
        self._expected.append(action)
        while self._expected and self._pipeline.knows_form(self._expected[0].stage, self._batch(self._expected[0])):
            self._post(self._expected.popleft())

    def _take(self, action: Action) -> Tensor:
        with in_profile("wait", action):
            while action not in self._receipts:  # the first of its form: the sender is about to tell it
                self._post(self._expected.popleft())
            return self._receipts.pop(action).tensor()

    def _post(self, action: Action) -> None:
        self._receipts[action] = self._pipeline.post_receive(action.stage, self._batch(action))

    def _batch(self, action: Action) -> Batch:
        return self._batches[action.micro_batch]

    def _send_activation(self, action: Action) -> None:
        self._pipeline.send(action.stage + 1, self._batch(action), self._ready.pop(action))

    def _receive_gradient(self, action: Action) -> None:
        form = self._passes[action.stage, action.micro_batch].form
        self._receipts[action] = self._pipeline.channels["gradient", "in"].receive(form)

    def _send_gradient(self, action: Action) -> None:
        self._pipeline.channels["gradient", "out"].send(self._ready.pop(action))


def in_profile(*what: Any) -> AbstractContextManager[Any]:
    """A range in the profile, which reports read: `pipeline F2.5`, and within it `pipeline wait RA2.5`."""
    return record_function(" ".join(map(str, ("pipeline", *what)))) if _profiler_enabled() else nullcontext()
