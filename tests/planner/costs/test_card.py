"""What `ddp-lab plan measure` measures of a device, and plans with what it writes."""

import tomllib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_lab.planner import command as script
from ddp_lab.planner import models
from ddp_lab.planner.contracts import OperatorCall
from ddp_lab.planner.costs import card, hardware
from ddp_lab.planner.costs.hardware import DeviceEntry, filled, table
from ddp_lab.planner.costs.kernels import SIZES, Sizes, on_memory
from ddp_lab.planner.outcome import simulate_step
from ddp_lab.planner.space import Case
from ddp_lab.runtime.config import RunConfig
from ddp_lab.untrusted import fitted
from tests.in_process import run_in_process
from tests.ranks import RankPool

CPU = torch.device("cpu")
SMALL = Sizes(((32, 16, 48),), (16, 64), 64, (64, 128), 1e-3)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of this processor, by the command, with small kernels."""
    path = tmp_path_factory.mktemp("card") / "card.toml"
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(SIZES, "cpu", SMALL)
        answer = run_in_process(script, "measure", "--output", str(path))
    assert answer.returncode == 0 and f"plan with --gpus 1x{path} --link LINK" in answer.stdout, answer.stderr
    return path


def entry_in(path: Path) -> dict[str, Any]:
    (entry,) = tomllib.loads(path.read_text())["devices"].values()
    return entry


def numbers(entry: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for name, value in entry.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{before}{name}.")
        elif isinstance(value, int | float):
            yield f"{before}{name}", value


def test_what_is_measured_is_in_the_table_s_units(recorded):
    """Whatever the processor: bounds that a wrong unit, or a rate turned over, would miss by far."""
    entry = dict(numbers(entry_in(recorded)))
    bounds = {
        **dict.fromkeys(("flops.float32", "flops.bfloat16", "flops.float16"), (1e6, 1e14)),
        **{"bytes_per_s": (1e7, 1e13), "elements_per_s": (1e6, 1e13), "memory_mib": (100, 1e8)},
        **dict.fromkeys(("operators.host_us", "efficiency.launch_us"), (0.5, 1e4)),
        **{f"operators.{access}": (1e-4, 1.0) for access in on_memory((8, 8))},
        **{f"efficiency.compute.{dtype}": (0.01, 1.0) for dtype in ("float32", "bfloat16", "float16")},
        **{"attention.forward": (1e-4, 50), "attention.backward": (1e-4, 50)},
        **{"attention.half": (0, 64), "attention.narrower": (0, 7)},
    }
    assert entry.keys() == bounds.keys()
    for name, (least, most) in bounds.items():
        assert least <= entry[name] <= most, name


def test_the_form_of_attention_is_read_from_two_lengths():
    lengths, form = (512, 1024, 4096), {"forward": 0.4, "backward": 0.3, "half": 375.0, "narrower": 0.5}
    parts = {
        (way, width, s): form[("forward", "backward")[way]] * s / (s + 375) * (width / 128) ** 0.5
        for way in (0, 1)
        for width in (64, 128)
        for s in lengths
    }
    assert card.attention_form(parts, lengths) == pytest.approx(form)


FIELDS = {
    **dict.fromkeys(("flops.bfloat16", "bytes_per_s", "elements_per_s", "efficiency.compute.bfloat16"), 3),
    **dict.fromkeys(("attention.forward", "attention.backward", "operators.contiguous", "operators.optimizer"), 3),
    **{"link.bytes_per_s": 3, "link.latency_us": 1 / 3, "efficiency.launch_us": 1 / 3, "operators.host_us": 1 / 9},
}


def test_a_plan_takes_every_field(recorded, tmp_path):
    """A step takes longer with a third of any rate in the file, or with thrice any latency."""
    entry = entry_in(recorded) | {
        **{"flops": {"bfloat16": 1e11}, "bytes_per_s": 1e10, "elements_per_s": 1e9},
        "efficiency": {"compute": {"bfloat16": 0.5}, "launch_us": 10.0},
        "link": {"bytes_per_s": 1e9, "latency_us": 50.0, "efficiency": 1.0, "source": "made up"},
    }
    entry["operators"] |= {"contiguous": 0.5, "optimizer": 0.1, "host_us": 10.0}
    entry["attention"] |= {"forward": 0.02, "backward": 0.02}
    before_s = step_of(entry, tmp_path)
    for field, less in FIELDS.items():
        *outer, name = field.split(".")
        at = worse = deepcopy(entry)
        for key in outer:
            at = at[key]
        at[name] /= less
        assert step_of(worse, tmp_path) > 1.0001 * before_s, field


def step_of(entry: Mapping[str, Any], folder: Path) -> float:
    path = folder / "own.toml"
    path.write_text(card.toml("mine", entry))
    cluster = hardware.cluster(f"2x{path}")
    model = replace(models.from_sizes(32, 48, 1, heads=1, vocab=50), task="causal-lm")
    config = RunConfig.of(choice="bucket_ddp_async", global_batch_size=4, grad_accum_steps=1, precision="bf16-true")
    planned = Case(model, cluster, config, 64)
    return simulate_step(planned).step_time_s


def test_the_link_of_the_ranks_that_measure(ranks: RankPool):
    for of_rank in ranks.run(2, card.link_entry, CPU, 2**22):
        assert 1e6 < of_rank["bytes_per_s"] < 1e12 and 0 < of_rank["latency_us"] < 1e6


def test_the_table_has_the_form_of_a_file():
    for key, entry in table()["devices"].items():
        if key != "cpu":  # whose memory is the machine's
            fitted(filled(entry), DeviceEntry, key, "entry")


def test_a_file_may_be_like_an_entry(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('[devices.mine]\nlike = "H100"\nmemory_mib = 1024\nsource = "me"\n')
    custom, h100 = hardware.cluster(f"2x8x{path}", between="ndr"), hardware.cluster("2x8xH100", between="ndr")
    assert custom.device.memory_bytes == 2**30 and custom.inside == h100.inside and custom.ranks_per_node == 8
    call = OperatorCall("aten.mm.default", ((2, 2),), ("bfloat16",), 10**12, 100)
    assert custom.device.seconds(call) == h100.device.seconds(call)
