"""A strategy computes the same whatever default dtype and device a script has set."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.models import build, make_batch
from tests.parity import FAMILIES, Case, assert_close, load, naming, options_of, oracle
from tests.parity import trained as train
from tests.ranks import RankPool
from tests.tables import each_row


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float64": lambda: default_dtype(torch.float64),
    "another device": lambda: torch.device("meta"),  # as set_default_device does; a tensor there has no values
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "simple_ddp": [{"compress": "int8"}, {"precision": "fp16", "loss_scale": 16.0}],
    "zero1": [{"offload": "optimizer"}],
    "zero2": [{"param_dtype": "bf16"}],
    "zero3": [{"offload": "parameters"}],
}
"""Options under which a choice makes tensors of its own."""
TOLERANCES = {torch.float64: 1e-12, torch.bfloat16: 2**-6}
STEPS = [[[2, 1], [1, 3]]] * 2


def trained(
    choice: str, options: dict[str, Any], around: Callable[[], AbstractContextManager[Any]]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of an fp32 model, and its state, by a loop of one's own and the runner's in turn."""
    module, batches = build("plain"), [make_batch("plain", 4, 10 * step + dist.get_rank()) for step in range(3)]
    with around():
        momentum: Any = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)  # noqa: E731
        strategy, numbers = load(choice)(module, momentum, options_of(choice, **options)), []
        for step, batch in enumerate(batches):
            strategy.zero_grad()
            if step % 2:
                numbers.append(strategy.forward_backward([batch]).item())
            else:
                with strategy.micro_batch():
                    strategy.scale_loss(strategy(**batch).loss).backward()
            numbers.append(strategy.verdict.loss_and_norm[1])
            numbers.append(strategy.clip_grad_norm_(0.5).item())
            strategy.step()
            with torch.inference_mode():
                numbers.append(strategy(**batch).loss.item())
        strategy.load_full_state_dict(strategy.full_state_dict())
        return numbers, strategy.full_state_dict()


def all_trained(choice: str):
    for options in [{}, *OPTIONS.get(choice, [])]:
        numbers, state = trained(choice, options, nullcontext)
        for name, around in AROUND.items():
            with naming((name, options)):
                losses, after = trained(choice, options, around)
                assert losses == numbers and all(torch.equal(after[name], state[name]) for name in state)
    results = {}
    for dtype in TOLERANCES:
        with naming(dtype), default_dtype(dtype):
            case = Case(choice, split=STEPS, clip=0.5)
            results[dtype] = train(case), oracle(case)
    for dtype, tolerance in TOLERANCES.items() if dist.get_rank() == 0 else ():
        state, expected = (result["state"] for result in results[dtype])
        assert_close(state, expected, tolerance, f"parameter in {dtype}")
        assert {tensor.dtype for tensor in state.values()} == {dtype}


@each_row("choice", FAMILIES)
def test_defaults_of_torch(ranks: RankPool, choice):
    """They change no bit of an fp32 model. A model in the default dtype trains in that precision, as in one process."""
    ranks.run(2, all_trained, choice)
