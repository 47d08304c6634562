"""A rank of a pipeline, as a strategy calls it (`ddp_lab.strategy.model_parallel.Pipeline`), and a step of it."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from ddp_lab.runtime.errors import OneRankError, UnsupportedError
from ddp_lab.runtime.mesh import PIPELINE
from ddp_lab.strategy.account import Collective
from ddp_lab.strategy.modules import tensors_in
from pipeline_parallel.actions import Action, Compute, Kind, Shape, arrived_by, list_of, messages_of
from pipeline_parallel.channels import Channel, Channels, Receipt
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
    """The form of a batch. With the stage, it decides the form of the stage's input and output, on both sides alike."""
    return tuple((tensor.dtype, tensor.shape) for tensor in tensors_in(batch))


class PipelineRunner:
    """Args:
    group: The ranks of the pipeline, in the order of their stages.
    tied: On the first and the last rank, what these share.
    """

    def __init__(
        self,
        stages: Stages,
        channels: Channels,
        group: dist.ProcessGroup,
        schedule: Compute,
        stages_per_rank: int,
        tied: Tied | None,
    ) -> None:
        self.stages, self._channels, self.tied = stages, channels, tied
        self._group, self._schedule, self._per_rank = group, schedule, stages_per_rank
        self.device = next(iter(channels.values())).device
        self._latest: Hashable = None  # the form of a batch

    def shape(self, micro_batches: int) -> Shape:
        return Shape(self._group.size(), micro_batches, self._per_rank)

    def channel(self, message: Action) -> Channel:
        """The channel of a message."""
        return self._channels[CHANNEL_OF[message.kind]]

    def actions(self, micro_batches: int) -> list[Action]:
        """The actions of this rank in a step."""
        return list_of(self._schedule, self.shape(micro_batches), self._group.rank())

    def begin(self, module: nn.Module) -> None:
        """A strategy is built over `module`, and nobody else will change `forward` of its blocks."""
        self.stages.take_turns()

    def step(self, batches: Sequence[Batch], forward: RunModel, loss_of: LossOf, backward_of: BackwardOf) -> None:
        """Forward and backward of all micro-batches. Collective over the pipeline."""
        shape, tied, self._latest = self.shape(len(batches)), self.tied, form_of(batches[-1])
        walk = Walk(self, batches, forward, loss_of, backward_of)
        if tied is not None:
            tied.refresh()
            tied.begin()
        walk.run(self.actions(len(batches)), arrived_by(self._schedule, shape, self._group.rank()))
        if tied is not None:
            tied.end()
        self._finish()

    def expected_traffic(self, micro_batches: int) -> list[Collective]:
        """See `ddp_lab.strategy.model_parallel.Pipeline`. Empty before the first step."""
        if self._latest is None:
            return []
        messages = [action for action in self.actions(micro_batches) if not action.kind.computes]
        hidden = [self.channel(message).nbytes((message.stage, self._latest)) for message in messages]
        values, gradients = self.tied.sizes() if self.tied else ([], [])
        sizes = {"activations": hidden, "parameters": values, "gradients": gradients}
        return [
            Collective("send_recv", len(message_bytes), sum(message_bytes), 2, content, PIPELINE)
            for content, message_bytes in sizes.items()
            if message_bytes
        ]

    def _finish(self) -> None:
        """Wait until all messages of this rank have arrived."""
        for channel in self._channels.values():
            channel.finish()

    def answer(self, forward: RunModel, args: Any, kwargs: Any) -> Any:
        """Returns the whole model's output on all ranks: `.loss` and `.logits`. Collective over the pipeline.

        Logits of tokens that have a loss are left out: nobody needs them, and each is as long as the vocabulary.
        """
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "a pipeline trains by forward_backward: its schedule has the forward passes of all stages"
            )
        if self.tied is not None:
            self.tied.refresh()
        output: Any = None
        form = form_of((args, kwargs))
        for stage in self.stages.numbers:
            hidden = self._channels["activation", "in"].receive((stage, form)).tensor() if stage else None
            channel = self._channels["activation", "out"] if stage + 1 < self.shape(1).stages else None
            output = self.stages.attempt(stage, hidden, lambda: forward(*args, **kwargs), channel, (stage, form))
            if channel is not None:
                channel.send((stage, form), output)
        self._finish()
        return self._from_last(output)

    def agree(self, group: dist.ProcessGroup, value: Any = None) -> list[Any]:
        """Gather the `value` of each rank of `group`; if a stage has refused forward, every rank raises. Collective."""
        entries: list[Any] = [None] * group.size()
        dist.all_gather_object(entries, (self.stages.refusal, value), group)
        self.stages.refusal = None
        if refusals := [refusal for refusal, _ in entries if refusal is not None]:
            raise UnsupportedError(next(filter(None, refusals), "a stage of the pipeline has refused this batch"))
        return [entry for _, entry in entries]

    def _from_last(self, output: Any) -> SimpleNamespace:
        last = self._group.size() - 1
        answer: dict[str, Tensor] = {}
        if self._group.rank() == last:
            loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
            tensors = {"loss": loss, "logits": logits if loss is None or logits is None or logits.ndim < 3 else None}
            answer = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
        forms = {name: torch.empty_like(tensor, device="meta") for name, tensor in answer.items()}
        for name, form in self.agree(self._group, forms)[last].items():
            if name not in answer:
                answer[name] = torch.empty_like(form, device=self.device)
            dist.broadcast(answer[name], group=self._group, group_src=last)
        return SimpleNamespace(**{"loss": None, "logits": None} | answer)


class Pass(NamedTuple):
    """One micro-batch in one stage, between forward and backward."""

    received: Tensor | None  # hidden states from the stage before
    root: Any  # where backward begins, without the hidden states that were sent; None if nothing trains up to here
    weights: WeightGradients | None  # the second half of a split backward pass


class Walk:
    """A step of `pipeline` over `batches`: runs the list of actions."""

    def __init__(
        self,
        pipeline: "PipelineRunner",
        batches: Sequence[Batch],
        forward: RunModel,
        loss_of: LossOf,
        backward_of: BackwardOf,
    ) -> None:
        self._pipeline, self._stages, self._tied = pipeline, pipeline.stages, pipeline.tied
        self._batches, self._forward, self._loss_of, self._backward_of = batches, forward, loss_of, backward_of
        self._shape, self._forms = pipeline.shape(len(batches)), [form_of(batch) for batch in batches]
        self._passes: dict[tuple[int, int], Pass] = {}
        self._weight_gradients: dict[
            tuple[int, int], WeightGradients
        ] = {}  # gradients of weights, by stage and micro-batch
        self._receipts: dict[Action, Receipt] = {}
        self._ready: dict[Action, Tensor] = {}  # by the action that sends it

    def run(self, actions: Sequence[Action], arrived: Mapping[Action, Sequence[Action]]) -> None:
        self._arrived = arrived  # by received message, the messages that its sender has used
        self._splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in actions)
        for action in actions:
            with in_profile(action):
                self._do(action)
        if self._stages.refusal is not None:  # all ranks see a loss that is not finite, and ask why
            nan = torch.full((), torch.nan, dtype=torch.float32, device=self._pipeline.device)
            self._loss_of(0, SimpleNamespace(loss=nan))

    def _do(self, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            self._run_forward(action)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            with self._backward(action):
                self._weight_gradients.pop(action[1:]).compute()
        elif action.kind.computes:
            self._run_backward(action)
        else:
            self._communicate(action)

    def _communicate(self, action: Action) -> None:
        channel, key = self._pipeline.channel(action), (action.stage, self._forms[action.micro_batch])
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
            self._pipeline.channel(sent).let_go(sent)
        return tensor

    def _run_forward(self, action: Action) -> None:
        _, stage, micro_batch = action
        received, sent = messages_of(action, self._shape)
        hidden = self._received(received)
        if hidden is not None:
            hidden.requires_grad_()
        weights, run = WeightGradients() if self._splits else None, partial(self._forward, **self._batches[micro_batch])
        channel = self._pipeline.channel(sent) if sent else None
        with weights or nullcontext():
            answer = self._stages.attempt(stage, hidden, run, channel, (stage, self._forms[micro_batch]))
        root: Any = None
        if sent:
            root = torch.autograd.graph.get_gradient_edge(answer) if answer.requires_grad else None
            self._ready[sent] = answer.detach()
        elif answer is not None:
            root = self._loss_of(micro_batch, answer)
        self._passes[stage, micro_batch] = Pass(hidden, root, weights)

    def _run_backward(self, action: Action) -> None:
        received, sent = messages_of(action, self._shape)
        gradient = self._received(received)
        hidden, root, weights = self._passes.pop(action[1:])
        with self._backward(action), weights or nullcontext():
            if root is not None:
                try:
                    torch.autograd.backward([root], [gradient])
                except OneRankError as error:
                    self._stages.refuse(str(error))
        if sent:
            assert hidden is not None, "the first stage sends no gradient"
            self._ready[sent] = torch.full_like(hidden, torch.nan) if hidden.grad is None else hidden.grad
        if weights:
            self._weight_gradients[action[1:]] = weights

    @contextmanager
    def _backward(self, action: Action) -> Iterator[None]:
        is_last = action.micro_batch + 1 == len(self._batches)  # stages take micro-batches in order
        if self._tied is not None:
            self._tied.adds = is_last
        with self._backward_of(is_last):
            yield
            if self._tied is not None and is_last and action.stage == 0 and action.kind is not Kind.BACKWARD_INPUT:
                self._tied.add_rest()


def in_profile(*words: Any) -> AbstractContextManager[Any]:
    """A range in the profile, which reports read: `pipeline F2.5`, and within it `pipeline wait RA2.5`."""
    return record_function(" ".join(map(str, ("pipeline", *words)))) if _profiler_enabled() else nullcontext()
