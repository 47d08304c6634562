"""Which settings there are for `test_settings.py`, what each of them promises, and on which modules they are tried."""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from ddp_lab.runtime.errors import UserError
from tests import parity
from tests.covering import Row, pairwise
from tests.models import BRANCHES, LORA, MODELS, UNUSUAL
from tests.parity import Choice, all_choices, load, options_of

Options = dict[str, Any]


class Rounding(NamedTuple):
    """Settings that change the numbers.

    Attributes:
        oracle: How the one process rounds (arguments of `oracle`). None: nothing rounds alike.
        loss: How far losses and norms may be off, relative.
        gradient: How far gradients of the first step may be off, relative to the largest element.
    """

    options: Options
    oracle: Options | None = None
    loss: float = 2**-6
    gradient: float = 2**-5


BF16, FP16 = {"param_dtype": "bf16"}, {"param_dtype": "fp16"}
AUTOCAST, AUTOCAST_FP16, ALL = {"precision": "bf16"}, {"precision": "fp16"}, {"precision": "bf16-true"}
REDUCED, SCALED = {"reduce_dtype": "bf16"}, {"loss_scale": 64.0}
INT8, COMPILED = {"compress": "int8"}, {"compile_backend": "aot_eager"}
ROUNDINGS = {
    "fp32": Rounding({}, {}, 1e-5, 1e-6),
    "bf16": Rounding(AUTOCAST, AUTOCAST),
    "fp16": Rounding(AUTOCAST_FP16 | SCALED, AUTOCAST_FP16, 2**-9, 2**-8),
    "fp16, overflowing": Rounding(AUTOCAST_FP16 | {"loss_scale": 2.0**17}),
    "reduced": Rounding(REDUCED, {}),
    "bf16, reduced": Rounding(AUTOCAST | REDUCED, AUTOCAST),
    "parameters in bf16": Rounding(BF16, BF16),
    "parameters in fp16": Rounding(FP16 | SCALED, FP16, 2**-7, 2**-8),  # pytorch_zero2 is 0.0045 off; cause unknown
    "parameters in bf16, reduced": Rounding(BF16 | REDUCED, BF16),
    "parameters in fp16, reduced": Rounding(FP16 | REDUCED | SCALED, FP16),
    "all in bf16": Rounding(ALL, ALL),
    "int8": Rounding(INT8, {}, 0.05, 0.05),
    "int8, bf16": Rounding(INT8 | AUTOCAST, AUTOCAST, 0.05, 0.05),
    "compiled": Rounding(COMPILED, {}, 1e-5, 1e-6),
    "compiled, bf16": Rounding(COMPILED | AUTOCAST, AUTOCAST),
    "compiled, parameters in bf16": Rounding(COMPILED | BF16, BF16),
}
RECOMPUTED = {how: {"activation_checkpointing": how} for how in ("block", "every:2", "selective", "op", "torch:block")}
OFFLOADED = {what: {"offload": what} for what in ("optimizer", "parameters", "optimizer:FOLDER", "parameters:FOLDER")}
PAIRS = {f"{one}, {two}": RECOMPUTED[one] | OFFLOADED[two] for one, two in product(RECOMPUTED, OFFLOADED)}
EXACT: dict[str, Options] = {"once more": {}, **RECOMPUTED, **OFFLOADED, **PAIRS}
"""Settings that must not change a bit."""
PAIRED = ("fp32", "fp16", "parameters in bf16")
"""With these, exact settings are tried in pairs too."""

FAMILIES = [
    *(("ddp", name) for name in ("simple_ddp", "bucket_ddp_async", "pytorch_ddp")),
    *(("sharding", name) for name in ("zero1", "zero2", "zero3", "pytorch_zero3")),
]
TRAPS = (*MODELS, *UNUSUAL, LORA, *BRANCHES, "normed", "deep", "awkward")
WITHOUT_BLOCKS = {"tied", "frozen", "odd", "normed", *BRANCHES}
BUILT_ON_DDP = ("pytorch_ddp", "pytorch_ddp_plain", "pytorch_zero1")
"""Their buckets are ordered as gradients come, which recomputation changes, and so is the sum of three ranks."""
WITH_STATISTICS = {"normed", "awkward"}
"""Of a rank's own samples: no one process has the same."""


class Case(NamedTuple):
    """A training, and an exact setting under which it must be the same."""

    choice: Choice
    rounding: str
    model: str
    exact: str

    @property
    def number(self) -> int:
        """Decides over the number of ranks, and whether gradients are clipped."""
        return all_choices().index(self.choice) + list(ROUNDINGS).index(self.rounding) + TRAPS.index(self.model)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of `oracle`: three steps on two ranks or three, which have different numbers of micro-batches in the last."""
        ranks = 2 if self.choice[1] in BUILT_ON_DDP else 2 + self.number % 2
        even = [[2, 3], [3, 2], [2, 2]]
        last = even if "compress" in ROUNDINGS[self.rounding].options else [[3, 2], [3], [2, 2]]
        optimizer = "sgd" if self.model.startswith("llama") else "adam"  # which would magnify its smallest gradients
        clip = 0.5 if self.number % 3 == 0 else None
        return self.model, [split[:ranks] for split in (even, even, last)], optimizer, clip

    def options(self, exact: str, folder: str = "FOLDER") -> Options:
        options = ROUNDINGS[self.rounding].options | EXACT[exact]
        if "offload" in options:
            options["offload"] = options["offload"].replace("FOLDER", folder)
        return options | {"find_unused_parameters": self.model in BRANCHES}

    def is_tried(self) -> bool:
        """Whether choice and module take the settings, and one process has a counterpart."""
        options = self.options(self.exact)
        if casts(options) and self.model == "odd":
            return False  # which computes with fp32 and fp64 at once
        if refusal(self.choice, options) or refusal_of_module(self.choice, self.model, options):
            return False
        return not is_rounded_otherwise(self.choice, self.model, options)


def casts(options: Options) -> bool:
    return "param_dtype" in options or options.get("precision") == "bf16-true"


def refusal(choice: Choice, options: Options) -> str | None:
    """What is said to `options`, whatever the module; None if the choice takes them."""
    try:
        load(choice).supports.require(options_of(choice, **options))
    except UserError as error:
        return str(error)
    return None


def refusal_of_module(choice: Choice, model: str, options: Options) -> str | None:
    """What a choice that takes `options` says to them with this module, if it cannot."""
    if "activation_checkpointing" in options and model in WITHOUT_BLOCKS:
        return "has no blocks"
    if "activation_checkpointing" in options and model in ("llama, checkpointed", "llama, checkpointed, re-entrant"):
        return "computes its blocks again by itself"
    if casts(options) and model in WITH_STATISTICS:
        return "keeps its statistics"
    if "compile_backend" in options and choice[1] == "zero3" and model in WITHOUT_BLOCKS:
        return "--compile: zero3 must gather layer by layer"
    return parity.REFUSALS.get((choice[1], model.partition(",")[0]))


def is_rounded_otherwise(choice: Choice, model: str, options: Options) -> bool:
    """Whether recomputation may change the last bit (docs/how-it-works/activation_checkpointing.md).

    Of a block that runs twice in low precision; and where gradients are rounded by what is beside them in a bucket:
    DDP orders its buckets as gradients come.
    """
    is_low = options.get("precision", "fp32") != "fp32" or "param_dtype" in options
    return "activation_checkpointing" in options and (
        (is_low and model == "out of order") or ("compress" in options and choice[1] in BUILT_ON_DDP)
    )


@cache
def sample() -> list[Case]:
    """Each pair of a choice of each family, a rounding and an exact setting, each time with another module."""
    exact = ["once more", "block", "op", "optimizer", "parameters:FOLDER"]
    roundings = [
        "fp32",
        "fp16, overflowing",
        "bf16, reduced",
        "parameters in fp16, reduced",
        "parameters in bf16",
        "all in bf16",
        "int8",
    ]

    @cache
    def is_taken(choice: Choice, rounding: str, exact: str) -> bool:
        return any(Case(choice, rounding, model, exact).is_tried() for model in TRAPS)

    def is_allowed(row: Row) -> bool:
        values = [[row[name]] if name in row else of for name, of in factors.items()]
        return any(is_taken(*one) for one in product(*values))

    factors = {"choice": FAMILIES, "rounding": roundings, "exact": exact}
    found, seen = [Case(("sharding", "zero3"), "fp16", "lookup", "selective")], Counter[Any]()  # where a bug was found
    for row in pairwise(factors, is_allowed):
        cases = [Case(row["choice"], row["rounding"], model, row["exact"]) for model in TRAPS]
        found.append(min(filter(Case.is_tried, cases), key=lambda case: sum(seen[case.model, v] for v in row.values())))
        seen.update((found[-1].model, value) for value in row.values())
    return found


def every_third_rounding(choice: Choice, model: str) -> Iterator[Case]:
    """With one exact setting each, in turn, of which `PAIRED` have pairs too. The next module has the next third."""
    for number, rounding in list(enumerate(ROUNDINGS))[TRAPS.index(model) % 3 :: 3]:
        offered = [name for name in EXACT if rounding in PAIRED or name not in PAIRS]
        cases = [case for name in offered if (case := Case(choice, rounding, model, name)).is_tried()]
        if cases:
            yield cases[(number + cases[0].number) % len(cases)]
