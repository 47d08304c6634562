"""The layout of a run record, of the fields that are read (`docs/run-record.md` has all, and says what they are)."""

import functools
import operator
from math import prod
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from ddp_lab.collectives.ranks import Ranks
from ddp_lab.runtime.config import FLAGS

COMPLETED = "completed"
Line = Annotated[str, Meta(max_length=1000, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
Sizes = Annotated[str, Meta(pattern=r"\A[a-z]+=[1-9]\d{0,5}(,[a-z]+=[1-9]\d{0,5})*\Z")]
Count = Annotated[int, Meta(ge=0, le=2**50)]
Several = Annotated[int, Meta(ge=1, le=2**40)]
GroupSize = Annotated[int, Meta(ge=1, le=10**6)]
Seconds = Annotated[float, Meta(ge=1e-9, le=1e9)]
Rate = Annotated[float, Meta(ge=1e-9, le=1e30)]
Loss = Annotated[float, Meta(ge=-1e30, le=1e30)]
Share = Annotated[float, Meta(ge=0, le=1)]
Sent = Annotated[float, Meta(ge=0, le=2**50)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e12)]
PARTS = ("parameters", "gradients", "optimizer_state", "buffers")
EXPECTED = tuple(f"expected_{part}" for part in PARTS[:3])


class Ended(msgspec.Struct):
    how: Line
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    collective: str | None = None
    message: str | None = None

    @property
    def problem(self) -> str:
        """How the run ended if it did not complete, in a line; else empty."""
        said = " ".join((self.message or "no message").split())
        return "" if self.how == COMPLETED else f"this run ended early ({self.how}: {said})"


class RunEnd(msgspec.Struct):
    """What is in the record of every run."""

    run_id: Line
    choice: Line
    ended: Ended


def layout(name: str, required: dict[Any, str], others: dict[Any, dict[str, Any]], **more: Any) -> Any:
    """A struct of fields by type; `others` have a value where they are missing."""
    fields: list[Any] = [(field, kind) for kind, names in required.items() for field in names.split()]
    fields += [(field, kind, value) for kind, values in others.items() for field, value in values.items()]
    return msgspec.defstruct(name, fields, **more)


def or_none(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split())


def ranks_exist(settings: Any) -> None:
    Ranks.parse(settings.profile_ranks or "0")


def is_table(timeline: Any) -> None:
    if len({len(getattr(timeline, name)) for name in timeline.__struct_fields__ if name != "phases"}) > 1:
        raise ValueError("columns of different lengths")


def fits_together(record: Any) -> None:
    ranks, mesh = [row.rank for row in record.memory], record.config.mesh
    if len(set(ranks)) < len(ranks) or max(ranks, default=0) >= record.world_size:
        raise ValueError(f"memory: rows of ranks {ranks[:9]} in a run of {record.world_size}")
    if mesh and prod(int(part.partition("=")[2]) for part in mesh.split(",")) != record.world_size:
        raise ValueError(f"config.mesh: {mesh} in a run of {record.world_size} ranks")
    needed = ("memory", "train_loss") if record.config.no_eval else ("eval", "memory", "train_loss")
    empty = [name for name in needed if not getattr(record, name)]
    if empty and not record.ended.problem:
        raise ValueError(f"{empty[0]}: empty, though the run completed")


def of_flag(field: Any) -> tuple[str, Any, Any]:
    """A flag in a record's config, which may lack it: the run is older than the flag."""
    texts = {"mesh": Sizes, "prompt": str}
    kinds = {str: texts.get(field.name, Line), int: Count, float: Rate}
    types = (kinds.get(kind, kind) for kind in get_args(field.type) or (field.type,))
    return field.name, functools.reduce(operator.or_, types), field.default


SETTINGS = msgspec.defstruct("Settings", map(of_flag, FLAGS), namespace={"__post_init__": ranks_exist})
TRAFFIC = layout(
    "Traffic",
    {Line: "kind", Count: "count payload_bytes"},
    {
        Count: {"group_size": 0},
        Line: {"dimension": "", "made_of": ""},
        Count | None: or_none("rank"),
        Sent | None: or_none("wire_bytes"),
        bool: {"varies": False},
    },
)
PHASE = layout("Phase", {str: "name", Milliseconds: "start_ms end_ms"}, {})
TIMELINE = layout(
    "Timeline",
    {
        list[Milliseconds]: "ms",
        list[str]: "where",
        list[Count]: " ".join(f"{part}_bytes" for part in (*PARTS, "highest")),
        list[PHASE]: "phases",  # type: ignore[valid-type]
    },
    {},
    namespace={"__post_init__": is_table},
)
MEMORY = layout(
    "Memory",
    {Count: "rank " + " ".join(f"{part}_bytes" for part in (*PARTS, *EXPECTED, "peak_rss"))},
    {
        Count | None: or_none("peak_bytes peak_model_states_bytes peak_workspace_bytes")
        | {f"peak_{part}_bytes": None for part in PARTS},
        Line | None: or_none("peak_phase"),
        TIMELINE | None: or_none("timeline"),
    },
)
THROUGHPUT = layout("Throughput", {Seconds: "step_s", Milliseconds: "core_s"}, {})
RUN_RECORD = layout(
    "RunRecord",
    {
        GroupSize: "world_size",
        Line: "backend backend_class device_name optimizer",
        SETTINGS: "config",
        Count: "settling_steps eval_samples",
        Several: "parameters train_samples",
        list[TRAFFIC]: "expected_traffic",  # type: ignore[valid-type]
        list[Several]: "step_samples",
        list[Seconds | None]: "step_time_s",
        list[Loss | None]: "train_loss",
        Rate | None: "samples_per_second tokens_per_second model_flops_per_second",
        layout("Evaluation", {Loss: "loss", Count: "samples", Share | None: "accuracy"}, {}) | None: "eval",
        list[MEMORY]: "memory",  # type: ignore[valid-type]
        layout("Resumed", {Count: "step"}, {}) | None: "resumed_from",
    },
    {
        Line: {"device": "cpu"},
        Line | None: or_none("host scheduling gpu_sharing"),
        Several | None: or_none("threads"),
        dict[str, Line]: {"versions": {}},
        list[list[list[Count]] | None] | None: or_none("step_expert_tokens"),
        list[Line]: {"shards": []},
        list[THROUGHPUT]: {"throughput": []},  # type: ignore[valid-type]
        list[str]: {"notes": [], "verdict": []},
    },
    bases=(RunEnd,),
    namespace={"__post_init__": fits_together},
)
