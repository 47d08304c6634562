"""The part of a model that is on a rank of a pipeline: one stage of it, or several.

The model keeps its own `forward`, on every rank. All ranks have the same samples, so each makes masks, positions and
the like for itself. Only the hidden states travel:
- A module of an earlier stage returns NaN, in the form of the hidden states that the rank has received.
- The first module of a stage that is called gets the received hidden states in place of this NaN.
- The first call of a module of a later stage ends the forward pass: its first argument is this stage's output.

So names stay as they are, and the module of a rank is an ordinary one with ordinary parameters: a data-parallel
strategy runs over it unchanged. It is right where forward calls modules of one stage after those of the stage before.
Whatever else forward does is refused, on the first rank that sees it.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import AgreedError, OneRankError
from ddp_lab.strategy.modules import first_of, with_first
from pipeline_parallel.channels import NOTHING, Channel
from pipeline_parallel.partition import Chain
from tensor_parallel.sequence import Tokens

PLAIN = bool | int | float | str
READS = frozenset({"item", "tolist", "numpy", "equal", "allclose", "__bool__", "__int__", "__float__", "__index__"})
"""Functions that tell Python what is in a tensor."""


class Handover(Exception):  # no BaseException: torch runs `always_call` hooks after an Exception only
    """Ends a forward pass before a module of another rank. Carries the hidden states, and the module's name."""


class NotHere(OneRankError, AttributeError):  # so that `hasattr` says no
    """Forward reads an attribute that is on another rank."""


def refused(reason: str) -> OneRankError:
    return OneRankError(f"--mesh with pp: forward {reason}")


class Absent(Tensor):
    """Hidden states that a later stage does not know, and results of them: NaN. A comparison would lose this."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        is_other = (name == "to" or name.endswith("_as")) and not isinstance(args[0], Absent)
        if is_other or name.startswith("new_") or name.endswith("_like"):  # a form is read
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        out = super().__torch_function__(func, types, args, kwargs or {})
        if name in READS or (isinstance(out, Tensor) and not (out.dtype.is_floating_point or out.dtype.is_complex)):
            raise refused(
                f"reads values of hidden states between its modules ({name.strip('_')}), and later stages do not know "
                "them; read them in a block, or take no pp"
            )
        return out


class Elsewhere(nn.Module):
    """In the place of `part`, which is on another rank. It holds nothing. With sequence parallelism, the hooks in front
    of it run here too: one of them cuts tokens."""

    def __init__(self, stages: "Stages", name: str, part: nn.Module, stage: int) -> None:
        super().__init__()
        vars(self).update({key: value for key, value in vars(part).items() if isinstance(value, PLAIN)})
        self.call, self.stands_for = partial(stages.pass_by, stage, name), type(part)
        self.place = f"{name}, which is in stage {stage} alone"
        for hooks in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs") if stages.tokens else ():
            setattr(self, hooks, getattr(part, hooks))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.call(args, kwargs)

    def __getattr__(self, key: str) -> Any:
        where = self.__dict__["place"]
        raise NotHere(f"{refused(f'reads {key} of {where}')}; call it, or a module here that shares its parameter")


class Stages:
    """The `stages` on this rank; `places` has the stage of each module of `chain`. Building them takes the modules of
    other stages out of `module`. `refusal` says why a pass that other ranks wait for is not done (`attempt`); empty if
    another stage knows."""

    def __init__(
        self,
        module: nn.Module,
        chain: Chain,
        places: Sequence[int],
        stages: Sequence[int],
        tokens: Tokens | None = None,
    ) -> None:
        self.numbers, self.tokens, self._stages = list(stages), tokens, places[-1] + 1
        self.refusal: str | None = None
        self._current: tuple[int, Tensor | None] | None = None  # the stage that computes, and what it has received
        self._latest = -1, ""  # of the module that was called last: its stage, and its name
        placed = [(name, part, stage) for (name, part), stage in zip(chain, places, strict=True)]
        self.parts = [part for part in placed if part[2] in stages]  # name, module, stage
        held_modules: set[Any] = {member for _, part, _ in self.parts for member in (part, *part.parameters())}
        for name, part, stage in placed:
            if stage not in stages:
                parent, _, child = name.rpartition(".")
                elsewhere = Elsewhere(self, name, part, stage)
                setattr(module.get_submodule(parent), child, elsewhere)
                if part not in held_modules:  # forward may know it by a way of its own
                    part.forward = elsewhere.forward
                for parameter in {*part.parameters()} - held_modules:
                    parameter.data = parameter.new_full((), torch.nan).expand(parameter.shape)

    def take_turns(self) -> None:
        """Wrap the `forward` of each module of this rank, so that it knows its turn. No later wrapper may follow."""
        for name, part, stage in self.parts:
            part.forward = partial(self._run, stage, name, part.forward)

    def attempt(
        self, stage: int, received: Tensor | None, forward: Callable[[], Any], channel: Channel | None, key: Hashable
    ) -> Any:
        """As `run`, but a refusal is kept until all ranks learn of it. Until then no rank waits for ever: a stand-in
        goes through `channel` to the next stage, if there is one."""
        if received is not None and received.shape == NOTHING:
            self.refuse("")
        if self.refusal is None:
            try:
                answer = self.run(stage, received, forward)
                if channel is not None:
                    channel.check(key, answer)
                return answer
            except OneRankError as error:
                self.refuse(str(error))
        return None if channel is None else channel.stand_in(key)

    def refuse(self, why: str) -> None:
        """The first reason counts."""
        self.refusal = why if self.refusal is None else self.refusal

    def run(self, stage: int, received: Tensor | None, forward: Callable[[], Any]) -> Any:
        """Run `forward()` of the whole model, of which only `stage` computes. Returns the model's output, or hidden
        states for the next stage.

        Args:
            received: The previous stage's hidden states. None for the first stage.
        """
        self._current, self._latest, to = (stage, received), (-1, ""), "nobody"
        try:
            answer = forward()
        except Handover as handover:
            answer, to = handover.args
        except Exception as error:
            if self._latest[0] in (-1, stage) or isinstance(error, AgreedError):
                raise
            raise refused(
                f"fails in stage {stage} after {self._latest[1]}, which returns one tensor there, in the form of the "
                f"received hidden states ({type(error).__name__}: {error}); take what follows it into a block"
            ) from error
        finally:
            self._current = None
        if stage + 1 < self._stages and (to == "nobody" or not isinstance(answer, Tensor)):
            reason = f"hands {type(answer).__name__} from stage {stage} to {to}, and not one tensor"
            raise refused(f"{reason}; let modules take hidden states first, and return only them")
        if any(
            isinstance(output, Absent)
            for output in (answer, getattr(answer, "loss", None), getattr(answer, "logits", None))
        ):
            raise refused(
                f"takes more of earlier stages into stage {stage} than the hidden states that this receives; "
                "x + block(x) belongs into a block, or both modules into one stage (--plan, split=)"
            )
        if self.tokens is not None:
            self.tokens.remember(answer)
        return answer

    def _run(self, stage: int, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._current is None:  # by itself, or once more in backward
            if isinstance(first_of(args, kwargs), Absent):
                raise refused(f"has a checkpoint around {name}, the first of its stage; take activation_checkpointing")
            return forward(*args, **kwargs)
        current, received = self._current
        if stage != current:
            return self.pass_by(stage, name, args, kwargs)
        if self._enter(stage, name) < stage and received is not None:
            args, kwargs = with_first(args, kwargs, lambda _: received)
        try:
            return forward(*args, **kwargs)
        except Handover as handover:
            raise refused(f"calls {handover.args[1]} in {name}; put both into one stage (--plan, split=)") from None

    def pass_by(self, stage: int, name: str, args: Any, kwargs: Any) -> Tensor:
        """Returns NaN for a module of another stage, since nothing may be computed from it."""
        if self._current is None:
            raise NotHere(f"--mesh with pp: {name} is called outside of forward, and is in stage {stage} alone")
        (current, received), first = self._current, first_of(args, kwargs)
        before = self._enter(stage, name)
        if stage > current:
            raise Handover(first if before == current else received, f"{name} of stage {stage}")
        assert received is not None, "the first stage has none before it"
        # Positions are of whole sequences: only the first block cuts tokens, by the hook in front of it.
        absent = received.new_full((*first.shape[:2], received.shape[-1]) if self.tokens else received.shape, torch.nan)
        return absent.as_subclass(Absent) if type(absent) is Tensor else absent

    def _enter(self, stage: int, name: str) -> int:
        """Note that forward calls a module. Returns the stage of the module before it, or -1."""
        (before, latest), self._latest = self._latest, (stage, name)
        if stage < before or before < 0 < stage:
            raise refused(
                f"runs {name} of stage {stage} {f'after {latest} of stage {before}' if latest else 'before all'}, but "
                "each stage runs once, in order: register modules in the order of their calls, or list those of each "
                "stage so (--plan, split=); to run blocks again, take no pp"
            )
        return before
