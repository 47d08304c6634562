"""One whole run: join the ranks, build model and strategy, train, evaluate, write the record."""

import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_lab.runtime.checkpoint.session import Checkpoints
from ddp_lab.runtime.config import RunConfig, choice_folder
from ddp_lab.runtime.data.copies import copied_ahead, token_count
from ddp_lab.runtime.data.lora import save_adapter
from ddp_lab.runtime.data.sampling import epoch_windows, rank_micro_batches, steps_in_epoch
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.data.workloads import build_workload, resolve_workload
from ddp_lab.runtime.distributed import Ranks, joined_ranks, meshed
from ddp_lab.runtime.errors import AgreedError, NonFiniteError, OneRankError, UserError, tell_torchrun
from ddp_lab.runtime.generation import generate, require_generates
from ddp_lab.runtime.groups import from_rank0, on_every_rank
from ddp_lab.runtime.loop import Plan, TrainingResult, evaluate, train
from ddp_lab.runtime.mesh import Mesh, MeshGroups
from ddp_lab.runtime.process.lazy_compiler import compiler_postponed
from ddp_lab.runtime.process.stop_request import stop_requests
from ddp_lab.runtime.profiling.memory_timeline import record_step_memory
from ddp_lab.runtime.profiling.profiler import WindowProfiler, require_tools_work, require_window_fits
from ddp_lab.runtime.records.flops import model_flops
from ddp_lab.runtime.records.metrics import step_metrics
from ddp_lab.runtime.records.progress import summary_line, training_progress
from ddp_lab.runtime.records.record import (
    gather_memory,
    make_run_id,
    make_trace_folder,
    package_versions,
    write_json,
    write_text,
)
from ddp_lab.runtime.records.run_so_far import RunSoFar, Setup
from ddp_lab.runtime.schedule import learning_rates
from ddp_lab.runtime.settings.file import to_toml
from ddp_lab.runtime.watch.cause import COMPLETED, STOPPED, Ending
from ddp_lab.runtime.watch.names import RankNames
from ddp_lab.runtime.watch.phases import between_steps
from ddp_lab.runtime.watch.watcher import watched
from ddp_lab.strategy.accounting import ModelSize
from ddp_lab.strategy.batches import MicroBatch, StepData
from ddp_lab.strategy.compilation import require_compiler
from ddp_lab.strategy.interface import Strategy
from ddp_lab.strategy.model_parallel import ModelParallel
from ddp_lab.strategy.registry import refuse_tensor_parallelism

OPTIMIZER = torch.optim.AdamW
Parallelize = Callable[[torch.nn.Module, RunConfig, MeshGroups, torch.device], ModelParallel]
"""Cuts a module in place over `MeshGroups.model`, as the run's settings say."""


def run(
    config: RunConfig,
    load_strategy: Callable[[str], type[Strategy]],
    load_parallelize: Callable[[str], Parallelize] = refuse_tensor_parallelism,
) -> int:
    """Train as `config` says, and return the exit code. An error that a user can put right is one line on rank 0."""
    silence_libraries()
    so_far, mesh = RunSoFar(config), Mesh.parse(config.mesh) if config.mesh else None
    try:
        with (
            stop_requests(config.checkpoint_every is not None) as so_far.stop_request,
            joined_ranks(config) as ranks,
            so_far.saying_errors(ranks.is_main),
            watched(ranks.rank, ranks.world_size, so_far.report, so_far.keep_flight, RankNames(mesh)),
            compiler_postponed(),
            meshed(ranks, config.mesh) as ranks_on_mesh,
        ):
            train_and_record(config, ranks_on_mesh, load_strategy, so_far, load_parallelize)
    except AgreedError as error:
        line = f"error: {config.label}: {error}"
        is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"  # it may be wrong on this node alone
        prints = not error.is_said and (is_first_here or isinstance(error, OneRankError))
        tell_torchrun(line, time.time() + (not prints))  # torchrun shows the earliest: the line that is printed
        if prints:
            print(line, file=sys.stderr, flush=True)
        return 1
    return 0


def train_and_record(
    config: RunConfig,
    ranks: Ranks,
    load_strategy: Callable[[str], type[Strategy]],
    so_far: RunSoFar | None = None,
    load_parallelize: Callable[[str], Parallelize] = refuse_tensor_parallelism,
) -> None:
    """Everything between joining the ranks and leaving them. Collective.

    Args:
        so_far: Collects what is known of the run, for the record of a run that ends early.

    Raises:
        UserError: the settings do not fit together, or files cannot be read or written.
        NonFiniteError: training diverged.
        SequenceError: ranks issued different collectives.
    """
    so_far = so_far or RunSoFar(config)
    config = resolve_workload(config, ranks.device.type == "cuda")
    config = replace(config, device=ranks.device.type, backend=ranks.backend)
    config.require_profiled_ranks(ranks.world_size)
    strategy_class = load_strategy(config.choice)
    strategy_class.supports.require_mesh(ranks.groups.mesh if ranks.groups else None)
    require_tools_work(config, ranks.device)
    micro_batch_size = config.micro_batch_size(ranks.data_size)
    run_id = so_far.run_id = from_rank0(make_run_id)
    trace_folder = on_every_rank(lambda: make_trace_folder(config, ranks.rank))
    checkpoints = Checkpoints(config, ranks, run_id, package_versions())
    if config.tf32 and ranks.device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    seed_everything(config.seed, rank=0)  # the same initial weights on every rank
    if config.strategy.compile:
        on_every_rank(lambda: require_compiler(ranks.device))
    workload = build_workload(config)
    require_generates(config, workload)
    require_sample_for_each_rank(len(workload.train), ranks.data_size)
    steps = planned_steps(config, len(workload.train))
    checkpoints.require_steps_left(steps)
    config = replace(config, lr=config.lr or workload.learning_rate)
    rates = learning_rates(config, steps)
    size = ModelSize.of(workload.model)
    flops = model_flops(workload.model, next(collated(config, workload, ranks, 1, 0)).micro_batches[0])
    model_parallel = cut_over_ranks(config, workload, ranks, load_parallelize)
    part = ModelSize.of(workload.model)  # this rank's
    strategy = build_strategy(config, workload, ranks, strategy_class, model_parallel=model_parallel)
    strategy.wants_to_stop = so_far.stop_request
    if not checkpoints.origin:
        require_window_fits(config, steps, strategy.settling_steps)
    so_far.begin(config, Setup(ranks, strategy, OPTIMIZER.__name__, size, workload, flops))
    seed_everything(config.seed, ranks.data_rank)  # but dropout of its own
    with closing(checkpoints):

        def first_step() -> Sequence[MicroBatch]:
            return next(batches_of_steps(config, workload, ranks, steps=1)).micro_batches

        earlier = so_far.result = checkpoints.begin(strategy, config, len(workload.train), steps, first_step)
        so_far.resumed_from = checkpoints.as_record()
        from_rank0(lambda: leave_config(so_far, ranks.world_size))
        settling = strategy.settling_steps  # fewer than before, if the checkpoint has what they would decide
        if checkpoints.origin and config.profile_steps(settling) > steps - checkpoints.done:
            # A run that was interrupted near its end must be able to finish without a profile.
            config = so_far.config = replace(config, no_profile=True)
        with (
            WindowProfiler(config, trace_folder, run_id, ranks, strategy.finish_communication, settling) as profiler,
            step_metrics(config, run_id, ranks.is_main) as log_step,
            training_progress(config.label, steps, ranks.is_main) as on_step,
        ):

            def after_step(result: TrainingResult) -> None:
                log_step(result)
                on_step(result)
                checkpoints.after_step(result)

            all_batches = batches_of_steps(config, workload, ranks, steps, checkpoints.done)
            on_each = so_far.following(after_step)
            plan = Plan(earlier, checkpoints.is_due, rates)
            train(strategy, all_batches, profiler, config.clip_grad_norm, on_each, plan)
            checkpoints.finish()
    done = len(so_far.result.loss)
    if strategy.steps.stops_after == done < steps:
        on_every_rank(lambda: require_written(profiler))
        from_rank0(lambda: leave_stopped(so_far, steps, checkpoints.path_of(done)))
        return
    between_steps("evaluating")
    evaluation = so_far.evaluation = evaluate(strategy, workload, micro_batch_size, ranks.device)
    if not math.isfinite(evaluation["loss"]):
        raise NonFiniteError("the loss on held-out samples is not finite after training; a lower --lr may help")
    if config.lora_rank:
        save_adapter(strategy, choice_folder(config) / f"{run_id}.adapter")
    between_steps("generating")
    so_far.generated = generate(strategy, workload, config)
    between_steps("recording memory")
    step_data = next(batches_of_steps(config, workload, ranks, steps=1))
    step_memory = record_step_memory(strategy, step_data, config.clip_grad_norm)
    between_steps("finishing")
    so_far.memory = gather_memory(strategy, part, step_memory)
    so_far.gather_throughput()
    on_every_rank(lambda: require_written(profiler))
    record = so_far.record(Ending(COMPLETED))
    path = choice_folder(config) / f"{run_id}.run.json"
    from_rank0(lambda: write_json(path, record))
    if ranks.is_main:
        for note in record["notes"]:
            print(f"{config.label}: {note}", flush=True)
        if text := so_far.generated:
            print(f"{config.label}: generated after '{text['prompt']}': {text['text']}", flush=True)
        print(summary_line(config.label, record, str(path)), flush=True)


def leave_stopped(run: RunSoFar, steps: int, checkpoint: Path) -> None:
    """Write the record of a run that ends because SIGUSR1 asked it to, and say so.

    Raises:
        UserError: it cannot be written.
    """
    done, path = len(run.result.loss), choice_folder(run.config) / f"{run.run_id}.run.json"
    message = f"stopped by SIGUSR1 after step {done} of {steps}; checkpoint: {checkpoint}"
    write_json(path, run.record(Ending(STOPPED, step=done, message=message)))
    print(f"{run.config.label}: {message}; --resume continues; record: {path}", flush=True)


def leave_config(run: RunSoFar, world_size: int) -> None:
    """Write the file that repeats this run: the settings of its record, and the very checkpoint that it resumed from.

    Raises:
        UserError: it cannot be written.
    """
    config, path = run.config, choice_folder(run.config) / f"{run.run_id}.config.toml"
    if run.resumed_from:
        config = replace(config, resume=run.resumed_from["path"])
    command = f"python -m ddp_lab train --ranks {world_size} --config {path}"
    write_text(path, to_toml(config, f"Repeats run {run.run_id}: {command}"))


def require_sample_for_each_rank(samples: int, world_size: int) -> None:
    """Refuse data that leaves a rank without a sample in the first step.

    Raises:
        UserError: names both numbers.
    """
    if samples < world_size:
        raise UserError(
            f"{samples} training samples for {world_size} ranks; each rank needs one in the first step: raise "
            "--train-samples, give more data, or use fewer ranks"
        )


def planned_steps(config: RunConfig, samples: int) -> int:
    """Optimizer steps of the run: whole epochs, or `max_steps` if that is fewer."""
    return min(config.epochs * steps_in_epoch(samples, config.global_batch_size), config.max_steps or sys.maxsize)


def build_strategy(
    config: RunConfig,
    workload: Workload,
    ranks: Ranks,
    strategy_class: type[Strategy],
    group: dist.ProcessGroup | None = None,
    model_parallel: ModelParallel | None = None,
) -> Strategy:
    """The strategy over the workload's model.

    Args:
        group: The ranks that see different samples. Default: those of the mesh, or all.
        model_parallel: How the model is cut over other ranks (`cut_over_ranks`).
    """
    learning_rate = config.lr or workload.learning_rate
    return strategy_class(
        workload.model.to(ranks.device),
        lambda parameters: OPTIMIZER(parameters, lr=learning_rate, fused=True),
        replace(
            config.strategy,
            model_parallel=model_parallel,
            shard_groups=ranks.groups.shard_groups if ranks.groups else None,
        ),
        group or (ranks.groups.data if ranks.groups else None),
    )


def cut_over_ranks(
    config: RunConfig, workload: Workload, ranks: Ranks, load_parallelize: Callable[[str], Parallelize]
) -> ModelParallel | None:
    """Cut the workload's model in place, if the mesh says so. Collective."""
    if ranks.groups is None or ranks.groups.mesh.model_size == 1:
        return None
    workload.model.to(ranks.device)
    return load_parallelize(config.choice)(workload.model, config, ranks.groups, ranks.device)


def batches_of_steps(
    config: RunConfig, workload: Workload, ranks: Ranks, steps: int, first: int = 0
) -> Iterator[StepData]:
    """For each optimizer step from `first` on: this rank's micro-batches on its device, and what they amount to."""
    return copied_ahead(collated(config, workload, ranks, steps, first), ranks.device)


def collated(config: RunConfig, workload: Workload, ranks: Ranks, steps: int, first: int) -> Iterator[StepData]:
    """The same on the CPU."""
    size, done = config.micro_batch_size(ranks.data_size), 0
    for epoch in range(config.epochs):
        for window in epoch_windows(len(workload.train), config.global_batch_size, config.seed, epoch):
            if done == steps:
                return
            if done < first:
                done += 1
                continue
            mine = rank_micro_batches(window, ranks.data_rank, ranks.data_size, size)
            batches = [workload.collate([workload.train[index] for index in indices]) for indices in mine]
            yield StepData(len(window), batches, list(map(workload.count, batches)), sum(map(token_count, batches)))
            done += 1


def seed_everything(seed: int, rank: int) -> None:
    """Seed torch's generators: the same for the same `rank`, different between ranks."""
    torch.manual_seed(seed * 100_003 + rank)


def silence_libraries() -> None:
    """Keep warnings and progress bars of libraries off the terminal. Their errors are raised, and so not lost."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"


def require_written(profiler: WindowProfiler) -> None:
    if profiler.write_problem:
        raise UserError(profiler.write_problem)
