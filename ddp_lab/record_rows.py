"""What is in lists and parts of the run record (ddp_lab/record_format.py): bounded types, and a struct for each part.

The string under a field says what it is. `docs/run-record.md` is printed from these by scripts/print_docs.py.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ddp_lab.collectives.ranks import MOST_RANKS

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


class Compiled(Struct):
    blocks: Count
    """modules that are compiled, each as a unit"""
    graphs: Count
    """graphs of forward passes; equal blocks share them"""
    recompilations: dict[str, int]
    """number of graphs that were made because no earlier graph held, by torch's reason"""
    graph_breaks: dict[str, int]
    """number of breaks in a block's graph, by torch's reason"""
    seconds: float
    """seconds in which rank 0 compiled, forward and backward"""


class Traffic(Struct, kw_only=True):
    kind: Line
    """`all_reduce`, `broadcast`, `reduce`, `all_gather`, `reduce_scatter`, `scatter`, `all_to_all` or `send_recv`
    (messages between two ranks)"""
    count: Count
    """number of calls"""
    payload_bytes: Count
    """bytes of all these calls together, by nccl-tests' definition of size; for messages, sent and received bytes"""
    group_size: Count = 0
    """ranks in the process group"""
    purpose: Line = ""
    """`gradients`, `parameters`, `activations`, `buffers` or `bookkeeping`"""
    dimension: Line = ""
    """with `--mesh`, the dimension of the mesh: `dp`, `replicate`, `shard`, `ep`, `pp`, `cp` or `tp`, whose ranks
    differ in that dimension alone; `dp` too for all ranks that see different samples, where they are in `replicate` and
    `shard`, or in `dp` and `ep`; `mesh` for all ranks, unless one dimension has them all. Empty without a mesh"""
    rank: Count | None = None
    """with `pp`, whose stages differ, the rank that issues them; null: every rank does. A run that ended early
    names rank 0 alone"""
    made_of: Line = ""
    """`2 scatters` or `2 broadcasts`: the calls, one from each rank, that make one over Gloo; empty for calls by
    themselves"""
    varies: bool = False
    """whether the bytes depend on the rank's samples, as for tokens sent to experts; `payload_bytes` is then the mean
    over ranks"""
    at_least: bool = False
    """whether this is no formula, but a lower bound of the bytes that a rank sends: PyTorch's and DeepSpeed's
    originals, `--compress`, and cut models that recompute activations"""
    wire_bytes: Positive | None = None
    """bytes that a rank sends for them on average: `payload_bytes` x 2(N-1)/N for all-reduce, (N-1)/N for
    reduce-scatter, all-gather, all-to-all, broadcast and reduce, 1/2 for messages"""


class Throughput(Struct):
    rank: Rank
    """rank"""
    samples_per_second: float | None
    """samples of this rank per second of its own clock, over the same steps"""
    tokens_per_second: float | None
    """tokens of this rank per second; null if there are none"""
    step_s: Seconds | None
    """mean seconds of the whole step; like the next fields over the same steps, by this rank's clock; null if no step
    was timed"""
    data_s: Positive | None
    """seconds in which its training thread loaded and collated the batch"""
    collectives_s: Positive | None
    """seconds in which that thread waited in collectives; null if C++ waits for most of them (PyTorch DDP)"""
    device_s: Positive | None
    """seconds in which it waited for its GPU; null on a CPU"""
    core_s: Positive | None
    """seconds in which it could run and no core was free, by Linux's count (`/proc/thread-self/schedstat`)"""
    late_s: float | None
    """seconds by which it came last to a collective, after the median of the other ranks: the longest in a step,
    median over steps. From the flight recorder, so of the last steps; null in a pipeline, whose schedule makes
    ranks wait, over several hosts, whose clocks differ, and where the recorder holds fewer than 3 timed steps"""


class Evaluation(Struct):
    loss: Loss
    """mean loss"""
    samples: Count
    """number of samples"""
    accuracy: Share | None
    """fraction of samples that are classified correctly, 0 to 1; null if the workload does not classify"""
    perplexity: float | None = None
    """for a causal language model the exponential of `eval.loss`, at most e^700; else null"""
    tokens: Count | None = None
    """for a causal language model the number of predicted tokens, over which `eval.loss` is the mean; else null"""


class Generated(Struct):
    prompt: str
    """the given text"""
    text: str
    """the text after it"""
    tokens: Count
    """number of generated tokens"""


class Resumed(Struct):
    step: Count
    """optimizer steps done there"""
    path: str = ""
    """its folder"""
    run_id: str = ""
    """the run that saved it"""
    changed: dict[str, list[Any]] = {}
    """the settings that differ, each with [then, now]"""


class Phase(Struct):
    name: str
    """`forward`, `backward`, `gradient_sync` or `optimizer`"""
    start_ms: Milliseconds
    """on the same clock as `ms`"""
    end_ms: Milliseconds
    """on the same clock as `ms`"""


class Timeline(Struct):
    ms: list[Milliseconds]
    """ms since the step began, without the time that sampling took"""
    where: list[str]
    """the module that has just run forward, the gradient that has just become ready, or before or after the
    optimizer"""
    parameters_bytes: list[Count]
    """storage of parameters at that moment"""
    gradients_bytes: list[Count]
    """storage of gradients"""
    optimizer_state_bytes: list[Count]
    """storage of optimizer states"""
    buffers_bytes: list[Count]
    """storage of buffers"""
    highest_bytes: list[Count]
    """the most bytes allocated since the sample before"""
    phases: list[Phase]
    """the parts of the step, in order"""
    communication_bytes: list[Count] | None = None
    """of parameters and gradients: the storage of gathered units, and of buckets whose gradients are kept elsewhere"""
    allocated_bytes: list[Count] | None = None
    """all bytes of tensors allocated at that moment"""

    def __post_init__(self) -> None:
        columns = msgspec.structs.asdict(self)
        if len({len(column) for name, column in columns.items() if name != "phases" and column is not None}) > 1:
            raise ValueError("columns of different lengths")


class Memory(Struct, kw_only=True):
    """Of a rank."""

    rank: Count
    """data-parallel rank"""
    parameters_bytes: Count
    """storage of parameters at rest"""
    gradients_bytes: Count
    """storage of gradients, and of the buckets that hold or copy them, at rest"""
    optimizer_state_bytes: Count
    """storage of optimizer states at rest"""
    buffers_bytes: Count
    """storage of module buffers at rest"""
    expected_parameters_bytes: Count
    """parameters at rest by the formula: all, or a rank's shard if `shards` names them; plus the known extra memory of
    a reference, such as the copy of gradients in DDP's buckets"""
    expected_gradients_bytes: Count
    """the same for the gradients of trainable parameters"""
    expected_optimizer_state_bytes: Count
    """the same for Adam's two moments"""
    host_bytes: Count | None = None
    """with `--offload`: shard, gradient and optimizer states in host memory or in files, at rest"""
    expected_host_bytes: Count | None = None
    """the same by the formula"""
    peak_parameters_bytes: Count | None = None
    """the most storage of parameters in any sample of the recorded step"""
    peak_gradients_bytes: Count | None = None
    """the same for gradients"""
    peak_optimizer_state_bytes: Count | None = None
    """the same for optimizer states"""
    peak_buffers_bytes: Count | None = None
    """the same for buffers"""
    peak_model_states_bytes: Count | None = None
    """the most of these four together in one sample"""
    peak_bytes: Count | None = None
    """the most bytes of tensors allocated at one time in the recorded step, with activations and temporaries"""
    peak_ms: Milliseconds | None = None
    """time of the peak: ms since the recorded step began"""
    peak_phase: Line | None = None
    """part of the step with the peak: `forward`, `backward`, `gradient_sync`, `optimizer` (with `2 of 2` if there are
    several micro-batches), or `between phases`"""
    peak_workspace_bytes: Count | None = None
    """the most bytes that operators allocated and freed inside a call, such as oneDNN's packed operands of bf16
    products: beside tensors on a CPU, where they depend on the processor's instruction set; null on a GPU, whose
    allocator's peak holds them"""
    peak_reserved_bytes: Count | None = None
    """peak of the GPU memory held by torch's allocator in that step, free blocks included; null on a CPU"""
    device_used_bytes: Count | None = None
    """GPU memory in use after that step, by all processes; null on a CPU"""
    timeline: Timeline | None = None
    """samples of the recorded step, in columns of equal length"""
    peak_rss_bytes: Count
    """largest resident set of the process, libraries included"""
    limit_bytes: Count | None = None
    """memory limit of this rank: its equal part of its GPU, or of the memory of host or container (cgroup v2)"""
