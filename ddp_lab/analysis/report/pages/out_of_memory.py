"""A run that ended out of memory: what it asked for, and settings that would have fitted, by the planner's figures."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from ddp_lab.analysis.metrics.memory import failed_allocation
from ddp_lab.analysis.report.page import Block
from ddp_lab.analysis.sentences import say
from ddp_lab.progress import long_work
from ddp_lab.runtime.config import FLAGS
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.data import is_own

MOST_SETTINGS = 3
UNKNOWN_LINK = "pcie4"
"""Assumed where neither flags nor the device name one; memory does not depend on it."""


def out_of_memory_block(record: dict[str, Any] | None) -> Block:
    failed = failed_allocation(record)
    return Block("Out of memory", lambda: say("out_of_memory", failed, fitting_settings(record or {})), bool(failed))


def fitting_settings(record: Mapping[str, Any]) -> str:
    """Up to three changes of a run's settings with which it would fit; empty if the planner does not know the model or
    the device. A workload of the user's own is code, which a report on somebody's record must not run."""
    from ddp_lab.planner import findings, plan  # they load torch, and most runs end otherwise
    from ddp_lab.planner.command import build_parser
    from ddp_lab.planner.costs import hardware
    from ddp_lab.planner.outcome import outcome

    if is_own(record["config"]["workload"]):
        return ""
    config, device = record["config"], "cpu" if record["device"] == "cpu" else record["device_name"]
    options = build_parser().parse_args(["--gpus", f"{record['world_size']}x{device}"])
    flags = {flag.name for flag in FLAGS} & vars(options).keys()
    vars(options).update({name: config[name] for name in flags if config[name] is not None}, searches=False)
    options.workload = None if config["model"] else config["workload"]
    try:
        link = None if config["link"] == "none" else config["link"]
        options.link = link or hardware.entry_of(device)[1].get("link", UNKNOWN_LINK)
        case = plan.space_of(options).cases[0].but(choice=record["choice"])
        with long_work("simulating settings that need less memory"):
            simulated = ((words, outcome(changed)) for words, changed in findings.remedies(case, any_choice=True))
            fitting = list(islice((pair for pair in simulated if pair[1].fits()), MOST_SETTINGS))
    except UserError:
        return ""
    return findings.what_fits(case.name, *zip(*fitting, strict=True)) if fitting else ""
