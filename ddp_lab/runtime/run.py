"""One whole run, from beginning to end: settings, ranks, model, strategy, loop, record.

`run` joins the ranks and answers for what goes wrong. `train_and_record` is what they do between.
"""

import gc
import math
import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab.machine import package_versions
from ddp_lab.runtime.build import (
    OPTIMIZER,
    Parallelize,
    build_strategy,
    cut_over_ranks,
    learning_rates,
    prepare_device,
    seed_everything,
)
from ddp_lab.runtime.checkpoint.session import Checkpoints
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.batches import batches_of_steps, collated, planned_steps, require_sample_for_each_rank
from ddp_lab.runtime.data.lora import save_adapter
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.data.workloads import build_workload, resolve_workload
from ddp_lab.runtime.distributed import RankContext, joined_ranks, meshed
from ddp_lab.runtime.errors import (
    ERROR_FILE,
    AgreedError,
    NonFiniteError,
    OneRankError,
    UserError,
    leave_as_one,
    speaks_for_node,
)
from ddp_lab.runtime.groups import from_rank0, on_every_rank
from ddp_lab.runtime.loop import TrainingResult, evaluate, train
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.process.environment import silence_libraries
from ddp_lab.runtime.process.launcher import stop_requests
from ddp_lab.runtime.profiling.memory_timeline import record_step_memory
from ddp_lab.runtime.profiling.profiler import WindowProfiler
from ddp_lab.runtime.records.flops import model_flops
from ddp_lab.runtime.records.metrics import step_metrics
from ddp_lab.runtime.records.progress import leave_config, leave_record, leave_stopped, start_line, training_progress
from ddp_lab.runtime.records.record import gather_memory, make_run_id, make_trace_folder
from ddp_lab.runtime.records.run_so_far import RunSoFar, Setup
from ddp_lab.runtime.watch.cause import RankNames
from ddp_lab.runtime.watch.phases import between_steps, start_so_far
from ddp_lab.runtime.watch.watcher import Watcher
from ddp_lab.strategy.account import ModelSize
from ddp_lab.strategy.batches import StepData
from ddp_lab.strategy.registry import HOOK, found_at, refuse_tensor_parallelism
from ddp_lab.strategy.strategy import Strategy

TEMPERATURE = 0.8
"""At which the text of `--generate` is drawn."""


def run(
    config: RunConfig,
    load_strategy: Callable[[str], type[Strategy]],
    load_parallelize: Callable[[str], Parallelize] = refuse_tensor_parallelism,
) -> int:
    """Train as `config` says, and return the exit code. An error that a user can put right is one line on rank 0."""
    between_steps("joining the ranks")
    silence_libraries()
    so_far, mesh = RunSoFar(config), Mesh.parse(config.mesh) if config.mesh else None
    try:
        with (
            stop_requests(config.checkpoint_every is not None) as so_far.stop_request,
            joined_ranks(config) as ranks,
            so_far.saying_errors(ranks.is_main),
            Watcher(
                ranks.rank, ranks.world_size, so_far.report, so_far.keep_flight, RankNames(mesh)
            ).watching() as watcher,
            meshed(ranks, config.mesh) as ranks_on_mesh,
        ):
            so_far.latest_collectives = lambda: watcher.flight.state().entries
            train_and_record(config, ranks_on_mesh, load_strategy, so_far, load_parallelize)
    except AgreedError as error:
        line = f"error: {config.label}: {error}"
        is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"  # it may be wrong on this node alone
        fails = is_first_here or isinstance(error, OneRankError)
        if fails and not error.is_said and (ERROR_FILE not in os.environ or speaks_for_node()):
            print(line, file=sys.stderr, flush=True)
        leave_as_one(line, 1, fails)
        return 1
    return 0


def train_and_record(
    config: RunConfig,
    ranks: RankContext,
    load_strategy: Callable[[str], type[Strategy]],
    so_far: RunSoFar | None = None,
    load_parallelize: Callable[[str], Parallelize] = refuse_tensor_parallelism,
) -> None:
    """Everything between joining the ranks and leaving them. Collective.

    `so_far` collects what is known of the run, for the record of a run that ends early.
    """

    def say(text: str) -> None:
        if text and ranks.is_main:
            print(f"{config.label}: {text}", flush=True)

    # Settings
    so_far = so_far or RunSoFar(config)
    config = resolve_workload(config, ranks.device.type == "cuda")
    config = replace(config, device=ranks.device.type, backend=ranks.backend)
    strategy_class = load_strategy(config.choice)
    strategy_class.supports.require_mesh(ranks.groups.mesh if ranks.groups else None)
    strategy_class.supports.require(config.strategy)
    micro_batch_size = config.micro_batch_size(ranks.data_size)
    run_id = so_far.run_id = from_rank0(make_run_id)
    trace_folder = on_every_rank(lambda: make_trace_folder(config, ranks.rank))
    checkpoints = Checkpoints(config, ranks, run_id, package_versions())
    prepare_device(config, ranks.device)

    # Model and data
    seed_everything(config.seed, rank=0)  # the same initial weights on every rank
    workload = build_workload(config)
    between_steps("preparing the strategy")
    require_generates(config, workload)
    require_sample_for_each_rank(len(workload.train), ranks.data_size)
    config, steps, note = planned_steps(config, len(workload.train))
    so_far.steps = steps
    say(note)
    checkpoints.require_steps_left(steps)
    config = replace(config, lr=config.lr or workload.learning_rate)
    rates, size = learning_rates(config, steps), ModelSize.of(workload.model)
    flops = model_flops(workload.model, next(collated(config, workload, ranks, 1, 0)).micro_batches[0])
    model_parallel = cut_over_ranks(config, workload, ranks, load_parallelize)
    part = ModelSize.of(workload.model)  # this rank's

    # Strategy
    strategy = build_strategy(config, workload, ranks, strategy_class, model_parallel=model_parallel)
    strategy.wants_to_stop = so_far.stop_request
    if HOOK in os.environ:
        found_at(os.environ[HOOK])(strategy)
    so_far.begin(config, Setup(ranks, strategy, OPTIMIZER.__name__, size, workload, flops))
    seed_everything(config.seed, ranks.drawing_rank)  # but dropout of its own

    def step_data() -> StepData:
        return next(batches_of_steps(config, workload, ranks, steps=1))

    # Loop
    with closing(checkpoints):
        earlier = so_far.result = checkpoints.begin(
            strategy, config, len(workload.train), steps, lambda: step_data().micro_batches
        )
        so_far.resumed_from = checkpoints.as_record()
        from_rank0(lambda: leave_config(so_far, ranks.world_size))
        settling = strategy.settling_steps  # fewer than before, if the checkpoint has what they would decide
        config, note = config.fitted(steps - checkpoints.step, settling)
        so_far.config = config
        say(note)
        with (
            WindowProfiler(
                config, trace_folder, run_id, ranks, strategy.finish_parameter_synchronization, settling
            ) as profiler,
            step_metrics(config, run_id, ranks.is_main) as log_step,
            training_progress(config.label, steps, ranks.is_main) as on_step,
        ):

            def after_step(result: TrainingResult) -> None:
                log_step(result)
                on_step(result)
                checkpoints.after_step(result)

            say(start_line(start_so_far()))
            gc.enable()  # `train_from_command_line` has put it off
            all_batches = batches_of_steps(config, workload, ranks, steps, checkpoints.step)
            train(
                strategy,
                all_batches,
                profiler,
                config.clip_grad_norm,
                so_far.following(after_step),
                earlier=earlier,
                is_due=checkpoints.is_due,
                learning_rate=rates,
            )
            checkpoints.finish()

    # Record
    steps_done = len(so_far.result.loss)
    if strategy.steps.stops_after == steps_done < steps:
        on_every_rank(lambda: require_written(profiler))
        from_rank0(lambda: leave_stopped(so_far, steps, checkpoints.path_of(steps_done)))
        return
    so_far.gather_throughput()
    if not config.no_eval:
        between_steps("evaluating")
        say(f"trained; evaluates on {len(workload.evaluation)} samples")
        so_far.evaluation = evaluate(strategy, workload, micro_batch_size, ranks.device)
        if not math.isfinite(so_far.evaluation["loss"]):
            raise NonFiniteError("the loss on held-out samples is not finite after training; a lower --lr may help")
    if config.lora_rank:
        save_adapter(strategy, so_far.file("adapter"))
    between_steps("generating")
    so_far.generated = generate(strategy, workload, config)
    between_steps("recording memory")
    step_memory = record_step_memory(strategy, step_data(), config.clip_grad_norm)
    between_steps("finishing")
    so_far.memory = gather_memory(strategy, part, step_memory)
    on_every_rank(lambda: require_written(profiler))
    from_rank0(lambda: leave_record(so_far))


def require_written(profiler: WindowProfiler) -> None:
    if profiler.write_problem:
        raise UserError(profiler.write_problem)


def require_generates(config: RunConfig, workload: Workload) -> None:
    """Refuse `--generate` and `--prompt` where they make no sense."""
    if not config.generate:
        return
    if workload.language is None:
        raise UserError(f"--generate: workload {config.workload} is no causal language model; see --task causal-lm")
    if not workload.language.tokenizer(config.prompt or workload.language.prompt)["input_ids"]:
        raise UserError("--prompt: has no tokens; give some text")


@torch.no_grad()
def generate(strategy: Strategy, workload: Workload, config: RunConfig) -> dict[str, Any] | None:
    """At most `config.generate` tokens after a prompt, and how many were made; None if the user asks for none.
    Collective.

    Rank 0 draws each token, at `TEMPERATURE`, with the seed of the run. All ranks run the model on the same tokens, as
    sharded ones must. There is no cache: each token takes a forward pass over the `context` before it.
    """
    language = workload.language
    if not config.generate or language is None:
        return None
    strategy.module.eval()
    prompt = config.prompt or language.prompt
    tokenizer = language.tokenizer
    ids = tokenizer(prompt)["input_ids"]
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    prompt_length, source = len(ids), torch.Generator().manual_seed(config.seed)
    for _ in range(config.generate):
        logits = strategy(input_ids=torch.tensor([ids[-language.context :]], device=strategy.device)).logits
        chosen = torch.zeros(1, dtype=torch.int64, device=strategy.device)
        if strategy.data_parallel_rank == 0:
            scores = logits[0, -1, : len(tokenizer)].double().cpu() / TEMPERATURE
            chosen.copy_(scores.softmax(-1).multinomial(1, generator=source))
        dist.broadcast(chosen, group=strategy.process_group, group_src=0)
        if chosen.item() == tokenizer.eos_token_id:
            break
        ids.append(int(chosen.item()))
    return {"prompt": prompt, "text": tokenizer.decode(ids[prompt_length:]), "tokens": len(ids) - prompt_length}
