"""The run record and the flight record: what writes them and what reads them shares these structs.

`docs/run-record.md` says what each field is. A field with a default may be missing in a record that is read.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ddp_lab.collectives.calls import Call
from ddp_lab.collectives.ranks import MOST_RANKS

RECORD_VERSION = 11
READABLE = (10, RECORD_VERSION)
"""Versions of the run record that this program reads."""
FLIGHT_VERSION = 1
SHARED_GPU = "step times tell about overlap and order, not about as many GPUs as ranks"
"""Behind a record's `gpu_sharing`."""
COMPLETED = "completed"
SWEEP_VARIABLE = "DDP_LAB_SWEEP"
"""In the environment of a run: its `SweepPass`, as JSON."""

Line = Annotated[str, Meta(max_length=1000, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
Count = Annotated[int, Meta(ge=0, le=2**50)]
Several = Annotated[int, Meta(ge=1, le=2**40)]
GroupSize = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
Seconds = Annotated[float, Meta(ge=1e-9, le=1e9)]
Rate = Annotated[float, Meta(ge=1e-9, le=1e30)]
Loss = Annotated[float, Meta(ge=-1e30, le=1e30)]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(ge=0, le=2**50)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e12)]


@dataclass(frozen=True)
class Ending:
    """How a run ended."""

    how: Line
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    collective: str | None = None
    message: str | None = None
    traceback: str | None = None

    @property
    def problem(self) -> str:
        """How the run ended if it did not complete, in a line; else empty."""
        said = " ".join((self.message or "no message").split())
        return "" if self.how == COMPLETED else f"this run ended early ({self.how}: {said})"


class SweepPass(Struct, frozen=True, kw_only=True):
    """Of which sweep, and of which of its passes, a run is."""

    id: Line
    family: Line
    command: str
    number: Several = 1
    passes: Several
    runs: Count = 0


class RunEnd(Struct, kw_only=True):
    """What is in the record of every run."""

    choice: Line
    run_id: Line
    ended: Ending
    sweep: SweepPass | None = None


class Compiled(Struct):
    blocks: Count
    graphs: Count
    recompilations: dict[str, int]
    graph_breaks: dict[str, int]
    seconds: float


class Traffic(Struct, kw_only=True):
    kind: Line
    count: Count
    payload_bytes: Count
    group_size: Count = 0
    purpose: Line = ""
    dimension: Line = ""
    rank: Count | None = None
    made_of: Line = ""
    varies: bool = False
    wire_bytes: Positive | None = None


class Throughput(Struct):
    rank: Rank
    samples_per_second: float | None
    tokens_per_second: float | None
    step_s: Seconds | None
    data_s: Positive | None
    collectives_s: Positive | None
    device_s: Positive | None
    core_s: Positive | None
    late_s: float | None


class Evaluation(Struct):
    loss: Loss
    samples: Count
    accuracy: Share | None
    perplexity: float | None = None
    tokens: Count | None = None


class Generated(Struct):
    prompt: str
    text: str
    tokens: Count


class Resumed(Struct):
    step: Count
    path: str = ""
    run_id: str = ""
    changed: dict[str, list[Any]] = {}


class Phase(Struct):
    name: str
    start_ms: Milliseconds
    end_ms: Milliseconds


class Timeline(Struct):
    ms: list[Milliseconds]
    where: list[str]
    parameters_bytes: list[Count]
    gradients_bytes: list[Count]
    optimizer_state_bytes: list[Count]
    buffers_bytes: list[Count]
    highest_bytes: list[Count]
    phases: list[Phase]
    allocated_bytes: list[Count] | None = None

    def __post_init__(self) -> None:
        columns = msgspec.structs.asdict(self)
        if len({len(column) for name, column in columns.items() if name != "phases" and column is not None}) > 1:
            raise ValueError("columns of different lengths")


class Memory(Struct, kw_only=True):
    """Of a rank."""

    rank: Count
    parameters_bytes: Count
    gradients_bytes: Count
    optimizer_state_bytes: Count
    buffers_bytes: Count
    expected_parameters_bytes: Count
    expected_gradients_bytes: Count
    expected_optimizer_state_bytes: Count
    host_bytes: Count | None = None
    expected_host_bytes: Count | None = None
    peak_parameters_bytes: Count | None = None
    peak_gradients_bytes: Count | None = None
    peak_optimizer_state_bytes: Count | None = None
    peak_buffers_bytes: Count | None = None
    peak_model_states_bytes: Count | None = None
    peak_bytes: Count | None = None
    peak_ms: Milliseconds | None = None
    peak_phase: Line | None = None
    peak_workspace_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    timeline: Timeline | None = None
    peak_rss_bytes: Count
    limit_bytes: Count | None = None


class RunRecord(RunEnd, kw_only=True):
    """What a run leaves. `config` has every flag."""

    schema_version: int = RECORD_VERSION
    world_size: GroupSize
    backend: Line
    backend_class: Line
    gpu_sharing: Line | None = None
    device: Line = "cpu"
    device_name: Line
    host: Line | None = None
    threads: Several | None = None
    scheduling: Line | None = None
    link_bits_per_s: float | None = None
    config: dict[str, Any]
    versions: dict[str, Line] = {}
    parameters: Several
    optimizer: Line
    shards: list[Line] = []
    settling_steps: Count
    compile: Compiled | None = None
    expected_traffic: list[Traffic]
    start_s: dict[str, float] = {}
    train_samples: Several
    step_samples: list[Several]
    step_time_s: list[Seconds | None]
    step_tokens: list[int | None] | None = None
    step_lr: list[float | None] = []
    step_grad_norm: list[float | None] = []
    step_expert_tokens: list[list[list[Count]] | None] | None = None
    step_loss_scale: list[float | None] | None = None
    skipped_steps: list[Count] = []
    samples_per_second: Rate | None
    tokens_per_second: Rate | None
    step_time_median_s: float | None = None
    throughput: list[Throughput] = []
    model_flops_per_sample: float | None = None
    model_flops_per_second: Rate | None
    train_loss: list[Loss | None]
    eval_samples: Count
    eval: Evaluation | None
    generated: Generated | None = None
    resumed_from: Resumed | None
    notes: list[str] = []
    memory: list[Memory]
    verdict: list[str] = []


class FlightRecord(Struct, kw_only=True):
    """The latest collectives of a rank that ended early, oldest first, and what it did."""

    version: int = FLIGHT_VERSION
    rank: Rank
    world_size: GroupSize
    step: int = -1
    phase: str = ""
    written_s: float = 0.0
    entries: list[Call]
