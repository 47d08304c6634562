"""An entrypoint with one planted fault: torchrun ... tests/faults/main_faulty.py --ddp-choice zero3

It is main_parallel.py with --mesh, else main_ddp.py or main_shard.py; with --ranks it is `ddp-lab train`.

The variable FAULT says what goes wrong where: `kind:rank=1:step=3:at=forward`. `kind` is one of `FAULTS`. `at` is
`forward`, `backward`, `optimizer`, `trace`, `data`, or `collective` (the first one after forward). Ranks that torchrun
has restarted have no fault.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import ddp
import sharding
import tensor_parallel
from ddp_lab.commands import train as command
from ddp_lab.families import EVERY
from ddp_lab.runtime.entrypoint import train_from_command_line
from ddp_lab.strategy.registry import Registry

HOOK_ID = 4_711


class Plan:
    """What FAULT says."""

    def __init__(self, text: str):
        self.kind, *fields = text.split(":")
        values = dict(pair.split("=") for pair in fields)
        self.rank, self.step = int(values.get("rank", 1)), int(values.get("step", 2))
        self.at = values.get("at", "forward")

    def is_due(self, strategy: Any, at: str) -> bool:
        is_here = int(os.environ["RANK"]) == self.rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        return is_here and at == self.at and strategy.optimizer_steps == self.step


def crash(strategy: Any):
    import ctypes

    ctypes.string_at(0)


def fail(strategy: Any):
    raise ValueError("planted")


def fail_in_bytes(strategy: Any):
    """As with a file's name that is not UTF-8."""
    raise ValueError("planted \udcff")


def fail_mute(strategy: Any):
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("in __str__")

    raise Mute


def ended_by(number: signal.Signals) -> Callable[[Any], None]:
    def plant(strategy: Any):
        os.kill(os.getpid(), number)
        time.sleep(60)

    return plant


def loop(strategy: Any):
    while True:
        pass


def eat_memory(strategy: Any):
    import resource

    import torch

    resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30, resource.RLIM_INFINITY))
    blocks = []
    while True:
        blocks.append(torch.empty(2**30, dtype=torch.uint8))  # never touched, so only addresses are used up


def extra_collective(strategy: Any):
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.zeros(5), src=0)


def extra_in_model(strategy: Any):
    """The same among ranks that hold parts of one model."""
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.zeros(5), group_src=0, group=strategy.model_parallel.group)


def spoiled_collective(change: Callable[[Any], list[Any]]) -> Callable[[Any], None]:
    """Before the next collective of gradients or parameters comes another one, of each tensor from `change`."""

    def plant(strategy: Any):
        import torch.distributed as dist

        plain = {name: getattr(dist, name) for name in ("all_reduce", "broadcast")}

        def spoiled(name: str) -> Callable[..., Any]:
            def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                if tensor.dtype.is_floating_point and tensor.numel() > 64:
                    for call_name, function in plain.items():
                        setattr(dist, call_name, function)
                    for extra in change(tensor):
                        plain[name](extra, **({"src": 0} if name == "broadcast" else {}))
                return plain[name](tensor, *args, **kwargs)

            return call

        for name in ("all_reduce", "broadcast"):
            setattr(dist, name, spoiled(name))

    return plant


def swap_gradients(strategy: Any):
    """Two gradients of equal size are all-reduced in the other order."""
    import torch.distributed as dist

    plain = dist.all_reduce
    delayed: list[Any] = []

    def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not delayed:
            delayed.append(tensor)
            return None
        dist.all_reduce = plain
        answer = plain(tensor, *args, **kwargs)
        plain(delayed[0], *args, **kwargs)
        return answer

    dist.all_reduce = all_reduce


def overflow(strategy: Any):
    """The first gradient becomes infinite, also when the step is repeated to find out where."""
    next(iter(strategy.leaves())).register_hook(lambda gradient: gradient + float("inf"))


def vanish(strategy: Any):
    """The run's folder is deleted while it trains."""
    import shutil

    (folder,) = Path(sys.argv[sys.argv.index("--output-dir") + 1]).glob("profile/*")
    shutil.rmtree(folder)


def fill_disk(strategy: Any):
    """No file may grow beyond 100 bytes from now on, which is how a full disk looks to a program."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))


FAULTS: dict[str, Callable[[Any], None]] = {
    "kill": lambda strategy: os.kill(os.getpid(), signal.SIGKILL),
    "crash": crash,
    "raise": fail,
    "stop": lambda strategy: os.kill(os.getpid(), signal.SIGSTOP),
    "loop": loop,
    "exit": lambda strategy: os._exit(0),
    "exit 7": lambda strategy: os._exit(7),
    "bytes": fail_in_bytes,
    "mute": fail_mute,
    **{number.name: ended_by(number) for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU, signal.SIGABRT)},
    "memory": eat_memory,
    "extra": extra_collective,
    "extra_in_model": extra_in_model,
    "dtype": spoiled_collective(lambda tensor: [tensor.double()]),
    "order": swap_gradients,
    "slow": lambda strategy: time.sleep(1.0),
    "nan": lambda strategy: setattr(strategy, "is_poisoned", True),  # see `Faulty.forward`
    "inf": overflow,
    "vanish": vanish,
    "disk": fill_disk,
}


def with_fault(real: type, plan: Plan) -> type:
    """`real`, with the fault planted."""
    planted = FAULTS[plan.kind]
    fired: list[Any] = []

    def fault(strategy: Any):
        if fired:
            return
        fired.append(strategy)
        if "FAULT_TIME_FILE" in os.environ:
            Path(os.environ["FAULT_TIME_FILE"]).write_text(str(time.time()))
        planted(strategy)

    class Faulty(real):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if plan.is_due(self, "forward"):
                fault(self)
            if plan.is_due(self, "backward"):
                leaf = next(iter(self.leaves()))
                handle = leaf.register_hook(lambda gradient: (handle.remove(), fault(self))[0])
            answer = super().forward(*args, **kwargs)
            if self.__dict__.pop("is_poisoned", False):
                answer.loss = answer.loss * float("nan")
            if plan.is_due(self, "collective"):
                if plan.kind in ("kill", "stop"):
                    self.process_group.register_post_hook(HOOK_ID, lambda call: fault(self))
                else:
                    fault(self)
            return answer

        def step(self, wait: bool = True):
            if plan.is_due(self, "optimizer"):
                fault(self)
            super().step(wait)

    Faulty.__name__ = real.__name__
    if plan.at == "trace":
        from ddp_lab.runtime.profiling import profiler as profiling

        plain = profiling.write_trace

        def write_trace(profiler: Any, path: Path):
            if int(os.environ["RANK"]) == plan.rank and profiler.step_num > plan.step:
                path.with_name(f".{path.name}.json").write_text("[")  # a part of it is written
                fault(None)
            plain(profiler, path)

        profiling.write_trace = write_trace
    if plan.at == "data":
        from ddp_lab.runtime import run

        plain_batches = run.batches_of_steps

        def batches(*args: Any, **kwargs: Any) -> Iterator[Any]:
            for number, step in enumerate(plain_batches(*args, **kwargs)):
                if int(os.environ["RANK"]) == plan.rank and number > plan.step:  # it is loaded a step ahead
                    fault(None)
                yield step

        run.batches_of_steps = batches
    return Faulty


def main() -> int:
    plan = Plan(os.environ["FAULT"])
    choice = sys.argv[sys.argv.index("--ddp-choice") + 1]
    of_one_dimension = ddp if choice in ddp.CHOICES else sharding
    starts_ranks = "--ranks" in sys.argv
    registry = EVERY if starts_ranks else (tensor_parallel if "--mesh" in sys.argv else of_one_dimension).REGISTRY

    class FaultyRegistry(Registry):
        def load(self, name: str) -> Any:
            return with_fault(registry.load(name), plan)

    faulty = FaultyRegistry.__new__(FaultyRegistry)
    faulty.__dict__.update(registry.__dict__)
    if starts_ranks:
        command.EVERY = faulty  # the ranks are forked
        return command.main(sys.argv[1:])
    return train_from_command_line("With a planted fault.", faulty)


if __name__ == "__main__":
    sys.exit(main())
