"""The run record and the flight record: what writes them and what reads them shares these structs.

The string under a field says what it is. `docs/run-record.md` is printed from these by scripts/print_docs.py. A field
with a default may be missing in a record that is read.
"""

from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from ddp_lab.collectives.calls import Call
from ddp_lab.record_rows import (
    Compiled,
    Count,
    Evaluation,
    Generated,
    GroupSize,
    Line,
    Loss,
    Memory,
    Rank,
    Rate,
    Resumed,
    Seconds,
    Several,
    Throughput,
    Traffic,
)

RECORD_VERSION = 11
READABLE = (10, RECORD_VERSION)
"""Versions of the run record that this program reads."""
FLIGHT_VERSION = 1
SHARED_GPU = "step times tell about overlap and order, not about as many GPUs as ranks"
"""Behind a record's `gpu_sharing`."""
COMPLETED = "completed"
SWEEP_VARIABLE = "DDP_LAB_SWEEP"
"""In the environment of a run: its `SweepPass`, as JSON."""


@dataclass(frozen=True)
class Ending:
    """How a run ended."""

    how: Line
    """`completed`; `stopped` (SIGUSR1 asked the run to save and end: [slurm.md](slurm.md)); or `failed` (an error
    of a rank, or of all), `killed` (a rank was killed or crashed), `hung` (a rank did not join a collective within
    `--timeout-minutes`), `mismatched` (ranks issued different collectives), `interrupted` (by SIGINT, SIGTERM or
    another signal), `lost` (connections broke and no cause is known)"""
    rank: int | None = None
    """the rank that caused the end; null if no single rank did"""
    step: int | None = None
    """optimizer steps done before the one in which it ended; null outside training"""
    phase: str | None = None
    """the rank's phase: `forward`, `backward`, `gradient_sync`, `optimizer`, `loading data`, `writing a trace`,
    `training loop` (the rest of a step), or, outside of steps, `saving a checkpoint` and what comes before or after
    training"""
    collective: str | None = None
    """the collective that the rank was in, that it issued last, or that it did not join: kind, number in its
    process group, elements and dtype"""
    message: str | None = None
    """the message for the user"""
    traceback: str | None = None
    """traceback of the failed rank, as in `<run_id>.traceback.txt`; null if there is none"""

    @property
    def problem(self) -> str:
        """How the run ended if it did not complete, in a line; else empty."""
        reason = " ".join((self.message or "no message").split())
        return "" if self.how == COMPLETED else f"this run ended early ({self.how}: {reason})"


class SweepPass(Struct, frozen=True, kw_only=True):
    """Of which sweep, and of which of its passes, a run is."""

    id: Line
    """UTC time at which it began"""
    family: Line
    """`ddp`, `sharding` or `parallel`"""
    command: str
    """the user's command, without `--resume`"""
    number: Several = 1
    """number of the run's pass, from 1"""
    passes: Several
    """number of passes"""
    runs: Count = 0
    """runs of the sweep when it is finished"""


class RunEnd(Struct, kw_only=True):
    """What is in the record of every run."""

    choice: Line
    """the strategy"""
    run_id: Line
    """UTC time and a random suffix, `20261121-093000-1f2e`; the names of the run's traces start with it"""
    ended: Ending
    """how the run ended"""
    sweep: SweepPass | None = None
    """the sweep of the run; null for a single run"""


class RunRecord(RunEnd, kw_only=True):
    """What a run leaves. `config` has every flag."""

    schema_version: int = RECORD_VERSION
    """version of this format; now 11, and 10 is read too"""
    world_size: GroupSize
    """number of ranks"""
    backend: Line
    """`gloo` or `nccl` (NCCL runs carry CPU tensors over Gloo)"""
    backend_class: Line
    """torch's class that carried the model's tensors: `ProcessGroupGloo`, `ProcessGroupNCCL2` (torch's `nccl`) or
    `ProcessGroupNCCL` (`nccl-legacy`); over the last two, step times of references differ
    ([status.md](status.md#whether-ddp-overlaps-over-nccl))"""
    gpu_sharing: Line | None = None
    """how ranks shared GPUs ([gpu.md](gpu.md#two-ranks-on-one-gpu)): `2 ranks a GPU, side by side` or `in turns`,
    without either if `--share-gpu` was not given (Gloo); null if each rank had its own GPU, or there was none"""
    device: Line = "cpu"
    """`cpu` or `cuda`"""
    device_name: Line
    """of rank 0: name of the GPU, or number of cores and name of the CPU"""
    host: Line | None = None
    """host name of rank 0"""
    threads: Several | None = None
    """threads that torch may use for an operator, on one rank"""
    scheduling: Line | None = None
    """Linux's scheduling policy of the ranks' threads, with the names of `chrt`: without a GPU `batch` (a thread
    that wakes does not interrupt another) instead of `other`, the default, unless the user chose one; null on other
    systems"""
    link_bits_per_s: float | None = None
    """rate of each rank's link by `--link`, in bits per second; null without it"""
    config: dict[str, Any]
    """every setting of the run, by the name of its flag; `auto` and a default learning rate are replaced by the used
    values"""
    versions: dict[str, Line] = {}
    """versions of Python and the main packages, and of NCCL on a GPU"""
    parameters: Several
    """number of elements in all parameters; tied ones count once"""
    optimizer: Line
    """name of the optimizer: `AdamW`"""
    shards: list[Line] = []
    """which of `parameters`, `gradients` and `optimizer_state` are sharded: a rank holds only its shard at rest"""
    settling_steps: Count
    """number of first steps that differ from later ones: 2 for `pytorch_ddp` and with `--compile`, otherwise 0;
    they are in no throughput and no profile"""
    compile: Compiled | None = None
    """with `--compile`, the work of torch.compile on rank 0 until the record was written; else null
    ([compile.md](compile.md))"""
    expected_traffic: list[Traffic]
    """the collectives that one rank issues in a full optimizer step, by the strategy's own formula, or a lower
    bound (`at_least`); empty in a run that ended in its first step"""
    start_s: dict[str, float] = {}
    """seconds from the beginning of rank 0's process until its first step is done, by phase: `importing` libraries,
    `joining the ranks`, `reading data` (text becomes tokens), `building the model`, `preparing the strategy` (and
    counting FLOPs), and the `first step`"""
    train_samples: Several
    """samples in the training data"""
    step_samples: list[Several]
    """samples in the global batch of each optimizer step"""
    step_time_s: list[Seconds | None]
    """wall time of each optimizer step on rank 0, with the loading of the batch; null for steps under the profiler
    of any rank, and for steps before the run resumed"""
    step_tokens: list[int | None] | None = None
    """tokens in the global batch of each optimizer step, padding left out; null if the workload has none, and for
    steps before the run resumed"""
    step_lr: list[float | None] = []
    """learning rate of each optimizer step; null for steps before the run resumed"""
    step_grad_norm: list[float | None] = []
    """2-norm of each optimizer step's gradient over the whole model, before clipping; null for steps that were
    skipped, and for steps before the run resumed"""
    step_expert_tokens: list[list[list[Count]] | None] | None = None
    """with `ep`, for each optimizer step and layer how many tokens of the global batch chose each expert; null for
    steps before the run resumed; null without `ep`"""
    step_loss_scale: list[float | None] | None = None
    """in fp16 the loss scale of each optimizer step ([precision.md](how-it-works/precision.md#loss-scaling)), null for
    steps before the run resumed; null in other precisions"""
    skipped_steps: list[Count] = []
    """numbers, from 0, of the optimizer steps that overflowed in fp16 and changed nothing; they count as steps, and
    those before the run resumed are not among them"""
    samples_per_second: Rate | None
    """samples of all ranks per second, over the timed steps without the first and the `settling_steps`; null if
    there are none"""
    tokens_per_second: Rate | None
    """tokens of all ranks per second, over the same steps; null if there are none"""
    step_time_median_s: float | None = None
    """median of the same steps' times"""
    throughput: list[Throughput] = []
    """one row per rank; empty in a run that ended before"""
    model_flops_per_sample: float | None = None
    """floating-point operations of one sample's forward and backward ([below](#model-flops)); null if they
    cannot be counted"""
    model_flops_per_second: Rate | None
    """`model_flops_per_sample` times `samples_per_second`, for all ranks together; null without either"""
    train_loss: list[Loss | None]
    """mean loss over the samples, or the tokens, of the global batch, for each optimizer step, in nats if it is a
    cross-entropy; null for a skipped step whose loss was not finite"""
    eval_samples: Count
    """held-out samples in the data"""
    eval: Evaluation | None
    """after training, over all held-out samples, each exactly once; null in a run that ended before, or with
    `--no-eval`"""
    generated: Generated | None = None
    """with `--generate`, the model's text; else null"""
    resumed_from: Resumed | None
    """the checkpoint that the run resumed from ([checkpoints.md](checkpoints.md)); null if it did not resume"""
    notes: list[str] = []
    """sentences on left-out data, and on decisions of the strategy"""
    memory: list[Memory]
    """one row per rank: its memory at rest after a step, and during a step; empty in a run that ended before"""
    verdict: list[str] = []
    """two lines: what limits the step and what to try next ([below](#the-verdict)); empty in a run that ended
    early"""


class FlightRecord(Struct, kw_only=True):
    """The latest collectives of a rank that ended early, oldest first, and what it did."""

    version: int = FLIGHT_VERSION
    rank: Rank
    world_size: GroupSize
    step: int = -1
    phase: str = ""
    written_s: float = 0.0
    entries: list[Call]
