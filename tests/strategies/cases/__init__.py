"""Cases whose ideas come from PyTorch's own tests of DDP, ZeroRedundancyOptimizer and FSDP2, by subject."""

from typing import NamedTuple

from tests.strategies.cases import containers, loops, parameters, running

SUBJECTS = {
    "running": running.CASES,
    "containers": containers.CASES,
    "parameters": parameters.CASES,
    "loops": loops.CASES,
}
CASES = {name: case for cases in SUBJECTS.values() for name, case in cases.items()}
ZERO = {"zero1", "zero2", "zero3"}
ONE_GRADIENT = ZERO | {"simple_ddp_hook", "simple_ddp_async", "bucket_ddp_async"}
"""Hand-written choices that reduce in backward."""
DDP, FSDP2 = {"pytorch_ddp", "pytorch_ddp_plain", "pytorch_zero1"}, {"pytorch_zero2", "pytorch_zero3"}


STALE = ("forward before the optimizer", "BatchNorm, evaluated with a graph before the optimizer")
BY_RANK = ("control flow by rank", "accumulation, control flow by rank", "experts")


class Refusal(NamedTuple):
    """The error of these choices for these cases, on every rank. docs/own-loop.md has a row for each."""

    cases: set[str]
    choices: set[str]
    says: str


REFUSALS = [
    Refusal({"two forwards, two backwards"}, ONE_GRADIENT | DDP, "received a second gradient in one micro-batch"),
    Refusal(
        {"a block in two re-entrant checkpoints"},
        ONE_GRADIENT | DDP - {"pytorch_ddp_plain"} | FSDP2,
        "received a second gradient in one micro-batch",
    ),
    Refusal({"a block in two re-entrant checkpoints"}, {"pytorch_ddp_plain"}, "mark a variable ready only once"),
    Refusal({"blocks in another order in each step"}, {"zero3"}, "which zero3 has freed, after"),
    Refusal({"a penalty on gradients"}, {"zero3"} | FSDP2, "backward with create_graph=True"),
    Refusal(
        {"weights of another block", "a penalty outside of forward"},
        {"zero3"},
        "so is a weight that is read outside of the module that holds it",
    ),
    Refusal({"weights of another block"}, FSDP2, "got mixed torch.Tensor and DTensor"),
    Refusal({"a penalty outside of forward"}, {"pytorch_zero3"}, "got mixed torch.Tensor and DTensor"),
    Refusal({"a parameter as an output"}, {"zero3"}, "forward returns a parameter or a view of one"),
    Refusal({"a parameter as an output"}, FSDP2, "forward returns parameter scale itself"),
    Refusal({"gradients that are never dropped"}, ZERO, "gradients of the step before are still here"),
    Refusal({"data is replaced"}, {"zero1", "zero2"}, "was replaced since the strategy was built"),
    Refusal({"data is replaced"}, {"zero3"}, "was replaced between steps"),
    Refusal({"parameters are clamped"}, {"zero3"}, "more than one element of the written-to tensor"),
    Refusal({"states are loaded into the module"}, {"zero3"} | FSDP2, "Error(s) in loading state_dict"),
    Refusal({"hundreds of tiny parameters"}, FSDP2, "doesn't support scalar parameters"),
    Refusal({"parameters of several dtypes"}, FSDP2, "FSDP expects uniform original parameter dtype"),
    Refusal({"parameters of several dtypes"}, {"pytorch_zero1"}, "using the same dense type for all parameters"),
    Refusal({"channels last, and a transposed weight"}, FSDP2, "does not support non-contiguous parameters"),
    Refusal({"two parameters over one memory"}, ZERO | FSDP2 | {"pytorch_zero1"}, "would come apart in shards"),
    Refusal({"LAMB", "Adafactor"}, ZERO | FSDP2, "is not known to work on each element by itself"),
    Refusal({"parameter groups and one cycle"}, {"pytorch_zero1"}, "optimizer must support momentum"),
]


WRONG = {(case, name) for case in ("data is replaced", *STALE, *BY_RANK) for name in FSDP2}
"""Where PyTorch's own choices silently compute something else, or wait for ever."""


def refusal(name: str, choice: str) -> str | None:
    """The error that `choice` must raise for the case `name`; None if it must train it."""
    return next((row.says for row in REFUSALS if name in row.cases and choice in row.choices), None)
