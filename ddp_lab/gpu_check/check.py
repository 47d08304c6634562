"""Does all parts, one after the other."""

import time
import traceback
from collections.abc import Mapping
from dataclasses import replace

from rich.console import Console

from ddp_lab.gpu_check.page import gist, page
from ddp_lab.gpu_check.parts import FAIL, SKIPPED, Broken, Machine, Part, Verdict
from ddp_lab.progress import long_work
from ddp_lab.strategy.registry import found_at


def parts(wanted: Mapping[str, tuple[str, int]]) -> list[Part]:
    """By name, where each is in this package, and how many GPUs it needs."""
    return [Part(name, found_at(f"ddp_lab.gpu_check.{where}"), least) for name, (where, least) in wanted.items()]


def check(machine: Machine, parts: list[Part]) -> int:
    """Do all parts, print a line for each, and write the page after each, so that a lost machine loses little."""
    console, began, verdicts = Console(highlight=False), time.monotonic(), dict[str, Verdict]()
    report = machine.folder / "report.md"
    console.print(machine.named, markup=False, soft_wrap=True)
    for number, part in enumerate(parts, 1):
        start = time.monotonic()
        with long_work(f"{number} of {len(parts)}: {part.name}"):
            verdict = verdicts[part.name] = look(part, machine)
        colour = {FAIL: "red", SKIPPED: "yellow"}.get(verdict.how, "green")
        seconds = time.monotonic() - start
        console.print(f"[{colour}]{verdict.how:<9}[/] {part.name:<12} {seconds:5.0f} s  ", end="")
        console.print(verdict.line, markup=False, soft_wrap=True)
        report.write_text(page(machine, verdicts, (time.monotonic() - began) / 60))
    failed = [name for name, verdict in verdicts.items() if verdict.how == FAIL]
    advice = f": {', '.join(failed)} failed; send the folder as an issue" if failed else ""
    console.print(f"\n{report}{advice}", markup=False, soft_wrap=True)
    return 1 if failed else 0


def look(part: Part, machine: Machine) -> Verdict:
    """The part's verdict. Whatever goes wrong in it is its verdict, too."""
    if machine.has_gpus and machine.ranks < part.least_gpus:
        return Verdict(SKIPPED, f"needs {part.least_gpus} GPUs")
    machine.bad_logs.clear()
    try:
        verdict = part.look(machine)
    except Broken as problem:
        verdict = Verdict(FAIL, str(problem))
    except Exception as error:
        verdict = Verdict(FAIL, f"{type(error).__name__}: {error}", texts={"traceback": traceback.format_exc()})
    if verdict.how != FAIL:
        return verdict
    logs = {str(log.relative_to(machine.folder)): gist(log) for log in machine.bad_logs}
    return replace(verdict, texts={**verdict.texts, **logs})
