"""The part of a model that is on a rank of a pipeline: one stage of it, or several.

The model keeps its own `forward`, on every rank. All ranks have the same samples, so each makes masks, positions and
the like for itself. Only the hidden states travel:
- A module of an earlier stage answers with NaN, in the form of what the rank has received.
- The first module of a stage gets what the rank has received, in the place of this NaN.
- The first module of a later stage ends the forward pass: its first argument is what this stage makes.

So names stay as they are, and the module of a rank is an ordinary one with ordinary parameters: a data-parallel
strategy runs over it unchanged.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import OneRankError
from ddp_lab.runtime.tensors import first_of, with_first
from pipeline_parallel.partition import Chain
from tensor_parallel.sequence import Tokens


class Handover(Exception):  # torch runs hooks that are always called behind no other
    """Ends a forward pass in front of a module that another rank has."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the hidden states are for another stage")
        self.hidden = hidden


class Elsewhere(nn.Module):
    """In the place of `part`, which is on another rank. It holds nothing. With sequence parallelism, the hooks in front
    of it run here too: one of them cuts tokens."""

    def __init__(self, stages: "Stages", part: nn.Module, stage: int) -> None:
        super().__init__()
        self.call, self.stands_for = partial(stages.pass_by, stage), type(part)
        for hooks in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs") if stages.tokens else ():
            setattr(self, hooks, getattr(part, hooks))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.call(args, kwargs)


class Stages:
    """The stages on this rank. Building them takes the modules of the others out of `module`.

    Args:
        own: The numbers of the stages on this rank.
        places: The stage of each module of `chain`.
        tokens: With sequence parallelism, what cuts them.
    """

    def __init__(
        self, module: nn.Module, chain: Chain, places: Sequence[int], own: Sequence[int], tokens: Tokens | None = None
    ) -> None:
        self.own, self.tokens, self._stages = list(own), tokens, places[-1] + 1
        self._current: tuple[int, Tensor | None] = (0, None)
        self.here: list[tuple[nn.Module, int]] = []  # what stays, with its stage
        for (name, part), stage in zip(chain, places, strict=True):
            if stage in own:
                self.here.append((part, stage))
            else:
                parent, _, child = name.rpartition(".")
                setattr(module.get_submodule(parent), child, Elsewhere(self, part, stage))

    def take_turns(self) -> None:
        """Let each module here know when it is not its turn. The last to change their `forward`."""
        begun: set[int] = set()
        for part, stage in self.here:
            part.forward = partial(self._run, stage, stage not in begun, part.forward)
            begun.add(stage)

    def run(self, stage: int, received: Tensor | None, forward: Callable[[], Any]) -> Any:
        """`forward()` of the whole model, of which `stage` alone computes.

        Args:
            received: What the stage before has made. None for the first one.

        Returns:
            The hidden states for the stage behind, or what the model answers if there is none.
        """
        self._current = stage, received
        try:
            answer = forward()
        except Handover as handover:
            answer = handover.hidden
        finally:
            self._current = (0, None)
        if stage + 1 < self._stages and not isinstance(answer, Tensor):
            raise OneRankError(f"stage {stage} of the pipeline makes {type(answer).__name__}, and not one tensor")
        if self.tokens is not None:
            self.tokens.remember(answer)
        return answer

    def _run(self, stage: int, is_first: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current, received = self._current
        if stage != current:
            return self.pass_by(stage, args, kwargs)
        if is_first and received is not None:
            args, kwargs = with_first(args, kwargs, lambda _: received)
        return forward(*args, **kwargs)

    def pass_by(self, stage: int, args: Any, kwargs: Any) -> Tensor:
        """What a module of another stage answers: nothing that anyone should compute with, so NaN."""
        current, received = self._current
        if stage > current:
            raise Handover(first_of(args, kwargs))
        assert received is not None, "the first stage has none before it"
        # Positions are of whole sequences: only the first block cuts tokens, by the hook in front of it.
        sequences = self.tokens and first_of(args, kwargs).shape[:2]
        shape = (*sequences, received.shape[-1]) if sequences else received.shape
        return received.new_full(shape, torch.nan)
