"""Plans: rows, intervals and recommendation of known simulations; the command as a user runs it."""

import importlib
import math
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
import torch

import sharding
from ddp_lab.planner import command as script
from ddp_lab.planner import models, plan
from ddp_lab.planner.contracts import Costs
from ddp_lab.planner.findings import reasons, recommended
from ddp_lab.planner.model import Model
from ddp_lab.planner.outcome import CaseOutcome, simulating
from ddp_lab.planner.rates import best_interval, flops_of_a_sample, multiplied
from ddp_lab.planner.space import REGISTRIES
from ddp_lab.planner.table import PLAN_COLUMNS, interval, row, runner_command
from ddp_lab.runtime.data.masks import read_no_masks
from ddp_lab.runtime.flags import ENTRYPOINTS, parse_config
from ddp_lab.runtime.records.flops import model_flops
from tests.command_page import flags_in, section
from tests.in_process import run_in_process
from tests.plans import GIB, case, outcomes_of, simulation
from tests.tables import each_row

ROOT = Path(__file__).parents[2]
WHERE = ["--gpus", "2xL4", "--link", "pcie4"]
TINY = ["--d-model", "64", "--d-ff", "96", "--layers", "1", "--vocab", "50", "--sequence-length", "16"]


def planned(*arguments):
    return run_in_process(script, *arguments)


def elements(*_):
    """As many as an operator computes on several threads."""
    return torch.ones(2**20).sum().item()


def test_simulations_of_a_process_that_has_threads(monkeypatch):
    """A long sequence's first simulation runs in the command's own process; the others are forked from it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert elements() == 2**20
        monkeypatch.setattr("ddp_lab.planner.outcome.outcome", elements)
        with simulating(2) as simulate:
            assert list(simulate([case()] * 2)) == [2**20] * 2  # type: ignore[comparison-overlap]
    finally:
        torch.set_num_threads(threads)


# Rows and intervals -------------------------------------------------------------------------------------------------


def test_a_row_says_what_the_simulation_says():
    """20.5 GiB of an L4's 22.5 GiB fit beside CUDA's 0.6; 8 samples of 128 tokens in 100 ms; 2 devices for 12 an hour
    each; fp32 at 30.3 TFLOP/s."""
    outcomes = outcomes_of(price=12, tokens=1024 * 36e3, zero1=simulation(100, 20, 20.5))
    flops = flops_of_a_sample(outcomes[0].case.model, 128)
    of = row(outcomes[0], flops)
    outside = outcomes[0].case.outside_bytes
    usable = 23034 * 2**20 - int(outside)
    assert outside == pytest.approx(637 * 2**20, rel=0.001)
    assert of["fits"] == "yes" and of["spare_bytes"] == usable - of["peak_bytes"] and of["peak_bytes"] == 20.5 * GIB
    assert of["entrypoint"] == "main_shard.py" and of["resting_bytes"] == of["peak_parameters_bytes"] == 10.25 * GIB
    assert of["samples_per_second"] == pytest.approx(80) and of["tokens_per_second"] == pytest.approx(80 * 128)
    assert of["exposed_ms"] == pytest.approx(20) and of["exposed_pct"] == pytest.approx(20)
    assert of["tokens_per_second_per_device"] == pytest.approx(40 * 128) and "cost_per_million_samples" not in of
    assert of["cost_per_billion_tokens"] == pytest.approx(2 * 12 * 1e9 / (80 * 128) / 3600)
    assert of["training_hours"] == pytest.approx(1.0) and of["training_cost"] == pytest.approx(24)
    assert flops and of["mfu_pct"] == pytest.approx(100 * 80 * flops / (2 * 30.3e12))
    assert "10,240 tokens/s on all devices, 1.0 hours and 24 $ in all; its peak" in " ".join(reasons(outcomes))
    of = row(outcomes_of(zero1=simulation(100, 20, 22.5), tokens=1e9)[0])
    assert of["fits"] == "no" and of["spare_bytes"] < 0 and "cost_per_billion_tokens" not in of
    assert "training_hours" not in of, "it never ends"


@each_row(
    ("type", "task", "kv_heads"), [("llama", "causal-lm", 2), ("qwen2", "classification", 4), ("gpt2", "causal-lm", 4)]
)
def test_flops_by_formula_are_those_of_a_run(type, task, kv_heads):
    """Counted by operator they are more by the angles of positions alone."""
    read_no_masks()
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": kv_heads}
    more = {} if type == "gpt2" else {"intermediate_size": 96}
    model = Model("tiny", type, {**shape, **more, "vocab_size": 200}, task=task)
    counted = model_flops(model.build(), model.micro_batches(1, 2, 32)[0])
    assert counted is not None and counted == pytest.approx(flops_of_a_sample(model, 32), rel=2e-3)


@each_row(
    ("type", "experts", "alike"),
    [
        ("mixtral", {"num_local_experts": 8, "intermediate_size": 96}, {"intermediate_size": 192}),
        ("olmoe", {"num_experts": 8, "intermediate_size": 96}, {"intermediate_size": 192}),
        ("qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 96, "head_dim": 16}, {"intermediate_size": 192}),
    ],
)
def test_of_experts_those_count_that_a_token_gets(type, experts, alike):
    """Two experts of eight cost what a dense layer of twice their width does, and the router comes on top."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    shape["vocab_size"] = 200
    mixture = Model("m", type, {**shape, **experts, "num_experts_per_tok": 2}, task="causal-lm")
    dense = flops_of_a_sample(Model("d", "llama", {**shape, **alike}, task="causal-lm"), 32)
    assert dense and flops_of_a_sample(mixture, 32) == dense + 32 * 6 * 2 * 64 * 8
    unsaid = Model("u", "granitemoe", {**shape, "intermediate_size": 96, "num_local_experts": 8}, task="causal-lm")
    assert multiplied(unsaid.build(), None) is None


def test_interval():
    """Collectives have an error of 0.3; communication is in flight for 60 of 100 ms, and compute for 80."""
    for compute_error, half in ((0.3, 30), (0.2, 20 + 0.1 * 60), (0.4, 30 + 0.1 * 80)):
        low, high = interval(simulation(100, 20, 1), Costs(mock.Mock(), mock.Mock(), 1.0, compute_error))
        assert (low * 1e3, high * 1e3) == (pytest.approx(100 - half), pytest.approx(100 + half))


# Recommendation -----------------------------------------------------------------------------------------------------


@each_row(
    ("times", "peaks", "expected"),
    [
        ((90, 100, 150), (30, 19, 5), "flat_ddp"),  # the fastest that fits
        ((101.9, 100, 102.1), (9, 8, 1), "simple_ddp"),  # of equally fast ones the simplest where there is room,
        ((101.9, 100, 102.1), (19, 18, 1), "flat_ddp"),  # else the one with the smallest peak
        ((101.9, 100, 102.1), (21, 20.5, 20), "flat_ddp"),
        ((120, 100, 130), (20.5, 20, 10), "zero3"),  # what leaves less than a tenth is not
        ((90, 90, 90), (40, 40, 30), None),  # nothing fits
    ],
)
def test_which_choice_is_recommended(times, peaks, expected):
    names = ("simple_ddp", "flat_ddp", "zero3")
    outcomes = outcomes_of(**{name: simulation(ms, 0, gib) for name, ms, gib in zip(names, times, peaks, strict=True)})
    best = recommended(outcomes)
    assert (best and best.case.config.choice) == expected
    text = " ".join(reasons(outcomes))
    assert text.startswith(f"Take {expected}: " if expected else "No strategy fits. zero3 comes nearest: ")
    assert "nothing to recommend" in reasons(outcomes_of(zero1=None))[0]


# Beside the plan -----------------------------------------------------------------------------------------------------


@each_row(
    ("peaks", "phrases"),
    [
        ({"block": 12, "selective": 20, "micro 1": 30}, ("selective (20.00 GiB", "block (12.00 GiB")),
        ({}, ("would fit with none of: --grad-accum-steps 8",)),
        ({"8": 8}, ("any of: 8 devices (8.00 GiB at the peak, 90.0 ms a step)",)),
        ({"zero3": 9}, ("--ddp-choice zero3 (9.00 GiB",)),
    ],
)
def test_what_does_not_fit_says_what_would(peaks, phrases):
    def simulate(cases):
        for point in cases:
            names = {point.config.choice, point.level, str(point.cluster.world_size), f"micro {point.micro_batch_size}"}
            yield CaseOutcome(point, simulation(90, 0, min(peaks.get(name, 40) for name in names)))

    of = case(batch=16)
    outcomes = [
        CaseOutcome(of.but(choice="zero1"), simulation(100, 0, 30)),
        CaseOutcome(of.but(choice="zero2"), None, "?"),
    ]
    (sentence,) = plan.besides(outcomes, None, simulate)
    assert all(words in sentence for words in phrases)


def test_what_would_be_faster_is_simulated_too():
    """bf16 where fp32 is planned; less recomputation where blocks are computed again and there is room."""
    speeds = {"bf16": 60, "selective": 70, "none": 101}

    def simulate(cases):
        for point in cases:
            precision = point.config.strategy.precision
            yield CaseOutcome(point, simulation(speeds[precision if precision == "bf16" else point.level], 0, 8))

    blocks = CaseOutcome(case(activation_checkpointing="block", choice="zero1"), simulation(100, 0, 9))
    (sentence,) = plan.besides([blocks], blocks, simulate)
    assert "--precision bf16 60.0 ms" in sentence and "selective 70.0 ms" in sentence and "none" not in sentence


@each_row(
    ("gpus", "mesh", "choice", "words"),
    [
        ("2xL4", None, "zero1", "--standalone --nproc_per_node=2 main_shard.py --ddp-choice zero1 "),
        ("4xL4", "dp=2,tp=2", "tp", "--nproc_per_node=4 main_parallel.py --ddp-choice tp "),
        ("2x4xL4", None, "flat_ddp", "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --nproc_per_node=4 "),
    ],
)
def test_the_command_of_a_run_is_one(gpus, mesh, choice, words):
    settings = {"mesh": mesh, "grad_accum_steps": 1, "activation_checkpointing": "selective", "clip_grad_norm": 1.0}
    of = case(gpus, choice=choice, **settings)
    command = runner_command(replace(of, model=replace(of.model, task="causal-lm")))
    assert command.startswith("uv run torchrun ") and words in command
    script_name, *arguments = command[command.index("main_") :].split()
    registry = importlib.import_module(ENTRYPOINTS[script_name]).REGISTRY
    config = parse_config("", registry, arguments=arguments)
    model = {"model": "HuggingFaceTB/SmolLM2-135M", "dataset": "DATASET", "task": "causal-lm", "sequence_length": 128}
    assert config == of.config.but(**model)


# The command --------------------------------------------------------------------------------------------------------


def test_plan_from_beginning_to_end(tmp_path):
    """On the real simulator: choices of both families, one that cannot be simulated, table and CSV."""
    files = ["--csv", str(tmp_path / "a" / "plan.csv"), "--price", "0.8", "--jobs", "1", "--precision", "bf16"]
    answer = planned(*TINY, *WHERE, "--choices", "pytorch_ddp,baseline,bucket_ddp_async,deepspeed_zero1", *files)
    assert answer.returncode == 0, answer.stderr
    loads, begun, *choices_done = answer.stderr.splitlines()  # a pipe sees each choice when it is done
    assert (loads, begun[:23]) == ("loading torch", "simulating 4 strategies") and len(choices_done) == 4
    assert re.match(r"1 of 4, about \d+ s to go: bucket_ddp_async: [\d.]+ ms, peak [\d.]+ GiB$", choices_done[0])
    assert answer.stdout.startswith("PREDICTED, not measured: ") and "Take " in answer.stdout
    assert re.search(r"^Run it: uv run torchrun .* --precision bf16$", answer.stdout, re.MULTILINE), "one line"
    table = pd.read_csv(tmp_path / "a" / "plan.csv")
    assert table.choice.tolist() == ["bucket_ddp_async", "pytorch_ddp", "baseline", "deepspeed_zero1"]
    assert list(table.columns) == [name for name in PLAN_COLUMNS if name in table.columns]
    assert table.fits.tolist() == ["yes"] * 3 + ["unknown"] and table.step_time_ms[0] == table.step_time_ms[2]
    rows = table.dropna(subset=["step_time_ms"])
    parts = [name for name in table.columns if name.startswith("peak_") and name != "peak_bytes"]
    assert rows[parts].sum(axis="columns").tolist() == rows.peak_bytes.tolist()
    elements = models.from_sizes(64, 96, 1, vocab=50).elements()
    assert (rows.peak_parameters_bytes >= 4 * elements).all() and (rows.peak_bytes < 40 * elements).all()
    assert (rows.step_time_low_ms < rows.step_time_ms).all() and (rows.step_time_high_ms > rows.step_time_ms).all()
    reason = "not installed; run: uv sync" if sharding.REGISTRY.missing else "DeepSpeed compiles extensions of its own"
    assert reason in table.note[3]


def test_a_mixture_over_ranks_from_beginning_to_end(tmp_path):
    """What the plan assumes of routing is said; biases save the forward passes ahead that the loss's term needs."""
    where = ["--gpus", "4xL4", "--link", "pcie4", "--sequence-length", "128", "--jobs", "1", "--grad-accum-steps", "2"]
    step_times = []
    for flags in ([], ["--router-bias", "0.001"]):
        table = tmp_path / "plan.csv"
        how = ["--mesh", "dp=2,ep=2", "--choices", "zero1", *flags, "--csv", str(table)]
        answer = planned("--model", "sample-moe", *where, *how)
        assert answer.returncode == 0, answer.stderr
        step_times.append(pd.read_csv(table).step_time_ms[0])
    assert 1.2 < step_times[0] / step_times[1] < 1.5
    assert "Take zero1@dp2-ep2: " in answer.stdout and " --workload sample-moe " in answer.stdout
    assert "Experts: each is assumed to get equally many tokens" in answer.stdout
    assert re.search(r"1 variant\n1 of 1: zero1@dp2-ep2 with --precision bf16: [\d.]+ ms", answer.stderr)


def test_an_own_workload_and_adapters(tmp_path):
    """On one device there is one choice; adapters have a hundredth of the gradients."""
    answer = planned("--workload", f"{ROOT}/examples/workload.py:build", "--gpus", "1xH100", "--jobs", "1")
    assert answer.returncode == 0, answer.stderr
    assert "Take bucket_ddp_async: " in answer.stdout and "workload.py:build --global-batch-size 8" in answer.stdout
    tables = {}
    for flags in ([], ["--lora-rank", "2"]):
        table = tmp_path / "plan.csv"
        failures = ["--mtbf-hours", "24", "--write-rate", "0.001", "--csv", str(table), "--jobs", "1"]
        sizes = ["--d-model", "256", "--d-ff", "1024", "--layers", "2", "--vocab", "50", "--sequence-length", "16"]
        answer = planned(*sizes, *WHERE, "--choices", "zero1,zero3", *flags, *failures)
        assert answer.returncode == 0, answer.stderr
        assert re.search(r"^Checkpoints: .* take [\d.]+ s at 0.001 GB/s; .* \(Young, Daly\)\.$", answer.stdout, re.M)
        tables[bool(flags)] = pd.read_csv(table)
    assert (tables[True].resting_bytes < 0.5 * tables[False].resting_bytes).all()


def test_the_interval_between_checkpoints():
    """A minute to write, a day between failures: by Young 2 x 1 x 1440 minutes, less than that with the minute itself;
    no interval costs less."""
    interval_s, share = best_interval(60, 86400)
    assert interval_s == pytest.approx((2 * 60 * 86400) ** 0.5 - 60, rel=0.01)
    for other_s in (0.8 * interval_s, 1.25 * interval_s):
        assert 86400 / other_s * math.expm1((other_s + 60) / 86400) - 1 > share
    assert best_interval(86400, 3600)[0] == 3600


def test_devices_side_by_side(tmp_path):
    """The best of each, in one table; the one that is cheaper by list price is named."""
    two = ["--gpus", "2xH100,2xA100", "--choices", "simple_ddp,zero1", "--jobs", "1", "--csv", str(tmp_path / "t.csv")]
    answer = planned(*TINY, *two)
    assert answer.returncode == 0, answer.stderr
    table = pd.read_csv(tmp_path / "t.csv")
    assert table.gpus.tolist() == ["2xH100", "2xA100"] and (table.fits == "yes").all()
    cheapest = table.gpus[table.cost_per_billion_tokens.idxmin()]
    assert f"Cheapest that fits: {cheapest}." in answer.stdout and "Run it: uv run torchrun" in answer.stdout
    assert planned(*TINY, "--gpus", "2xH100,2xH10").returncode == 2


# Documentation ------------------------------------------------------------------------------------------------------


def test_flags_and_columns_are_documented():
    text = section("ddp-lab plan")
    plans = []
    for command in script.COMMANDS:
        flags = [action.option_strings[0] for action in script.build_parser(command)._actions if action.option_strings]
        base = plans if command in ("search", "memory") else flags[:1]
        documented = flags_in(text.split(f"### {command}\n")[1].split("\n### ")[0])
        assert documented == [name for name in flags if name not in base]
        plans = flags if command == "plan" else plans
    rows = text.split("| column |")[1].split("\n\n")[0]
    explained = [(name, column.meaning) for name, column in PLAN_COLUMNS.items()]
    assert re.findall(r"^\| `([a-z_]+)` \| (.*) \|$", rows, re.MULTILINE) == explained


def test_commands_of_the_guide_can_be_planned():
    """docs/choosing.md: each of its commands makes sense, and what it says to take is one of its choices."""
    parts = (ROOT / "docs" / "choosing.md").read_text().split("\n## ")[1:]
    assert len(parts) == 5
    for part in parts:
        (command,) = re.findall(r"^    uv run ddp-lab plan (.+)$", part, re.MULTILINE)
        options = script.build_parser().parse_args(command.split())
        options.searches = False
        plan.space_of(options)
        (choice,) = re.findall(r"^- Take (\w+):", part, re.MULTILINE)
        assert choice in options.choices.split(",") and any(choice in of.sentences for of in REGISTRIES.values())
