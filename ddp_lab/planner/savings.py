"""`ddp-lab plan savings RUN`: what other settings of a recorded run would save of its memory, by simulations."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from ddp_lab.analysis.comparison.compare import latest_record
from ddp_lab.analysis.errors import TraceError
from ddp_lab.analysis.files import read_record
from ddp_lab.planner.contracts import Costs, MemoryCurve, Setting
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.cluster import Cluster, Link
from ddp_lab.planner.costs.links import LinkCosts
from ddp_lab.planner.plan import in_processes
from ddp_lab.planner.plan_command import printed, write
from ddp_lab.planner.report.columns import SAVINGS_COLUMNS
from ddp_lab.planner.runs import first_micro_batches, module_maker
from ddp_lab.planner.simulation.simulate import simulate
from ddp_lab.runtime.config import FLAGS, RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.accounting import storage_bytes

RECORDED = "as recorded"
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "zero1": {"choice": "zero1"},
    "zero2": {"choice": "zero2"},
    "zero3": {"choice": "zero3"},
    "--activation-checkpointing selective": {"activation_checkpointing": "selective"},
    "--activation-checkpointing block": {"activation_checkpointing": "block"},
    "--param-dtype bf16": {"param_dtype": "bf16"},
    "--param-dtype bf16 --master-dtype bf16": {"param_dtype": "bf16", "master_dtype": "bf16"},
    "--offload optimizer": {"offload": "optimizer"},
    "--offload parameters": {"offload": "parameters"},
}
TOGETHER = ("zero3", "--activation-checkpointing block", "--param-dtype bf16", "--offload parameters")


def read_recorded(path: Path) -> tuple[Mapping[str, Any], RunConfig]:
    """Record and settings of a run by its record (`*.run.json`), or of the latest in a folder `profile/<choice>`.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    try:
        record = latest_record(path) if path.is_dir() else read_record(path)
    except TraceError as error:
        raise UserError(str(error)) from None
    if record is None:
        raise UserError(f"{path}: no run record (*.run.json) in this folder; give profile/<choice> of a run")
    known = {field.name for field in FLAGS}
    try:
        config = RunConfig.of(**{name: value for name, value in record["config"].items() if name in known})
    except (TypeError, AttributeError):
        raise UserError(f"{path}: its settings cannot be read; train again") from None
    return record, replace(config, choice=record["choice"])


@dataclass(frozen=True)
class Recorded:
    """A run whose memory is asked about.

    Attributes:
        kind: Of its devices: `cpu` or `cuda`.
        backend: `gloo` or `nccl`.
    """

    config: RunConfig
    world_size: int
    kind: str
    backend: str

    @classmethod
    def of(cls, record: Mapping[str, Any], config: RunConfig) -> "Recorded":
        kind = str(record["device"]).partition(":")[0]
        return cls(config, int(record["world_size"]), kind, str(record["backend"]))

    @cached_property
    def _batches(self) -> list[dict[str, Any]]:
        return [dict(batch) for batch in first_micro_batches(self.config, self.world_size)]

    def memory(self, changes: Mapping[str, Any]) -> MemoryCurve:
        """Memory of rank 0 over a step of the changed run.

        Raises:
            UserError: the choice refuses it, or choice or workload cannot be simulated.
        """
        config = self.config.but(**changes)
        device = replace(hardware.device("cpu"), kind=self.kind)  # times do not matter
        cluster = Cluster(device, 1, self.world_size, Link("any", 0.0, 1e9), backend=self.backend)
        setting = Setting(config, module_maker(config), lambda: self._batches)
        return simulate(setting, cluster, Costs(device, LinkCosts(cluster))).memory

    def row(self, setting: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """What the table says of a changed run, in bytes; a note where there is nothing to say.

        On CPUs the batch is left out, as in a record: there it belongs to the process and not to a device.
        """
        try:
            memory = self.memory(changes)
        except UserError as error:
            return {"setting": setting, "note": str(error)}
        batch = storage_bytes(tensor for one in self._batches for tensor in one.values()) if self.kind == "cpu" else 0
        parts = {f"peak_{component}_bytes": held for component, held in memory.at_peak.items()}
        parts["peak_other_bytes"] -= batch
        return {"setting": setting, "note": "", "peak_bytes": memory.peak_bytes - batch, **parts}


def savings(recorded: Recorded, measured_bytes: float | None, jobs: int | None = None) -> pd.DataFrame:
    """A row for the recorded setting and for each of `CHANGES`; columns `SAVINGS_COLUMNS`.

    Args:
        measured_bytes: The recorded peak of rank 0.

    Raises:
        UserError: the recorded setting cannot be simulated.
    """
    base = recorded.config.as_dict()
    tasks: dict[str, Mapping[str, Any]] = {RECORDED: {}}
    for name, changes in CHANGES.items():
        if any(base[key] != value for key, value in changes.items()):
            tasks[name] = changes
    if recorded.world_size > 1:
        tasks[", ".join(TOGETHER)] = {key: value for name in TOGETHER for key, value in CHANGES[name].items()}
    rows = list(in_processes(recorded.row, list(tasks.items()), jobs))
    first = rows[0]
    if first["note"]:
        raise UserError(first["note"])
    first["measured_bytes"] = measured_bytes
    for row in rows:
        if "peak_bytes" in row:
            row["saved_bytes"] = first["peak_bytes"] - row["peak_bytes"]
    frame = pd.DataFrame(rows)
    return frame[[name for name in SAVINGS_COLUMNS if name in frame]]


def run(options: argparse.Namespace, console: Console) -> None:
    """Print the table, and write it where --csv says.

    Raises:
        UserError: the run cannot be used, or a file cannot be written.
    """
    record, config = read_recorded(options.run)
    recorded = Recorded.of(record, config)
    first: Mapping[str, Any] = next((row for row in record.get("memory", []) if row["rank"] == 0), {})
    frame = savings(recorded, first.get("peak_bytes"), options.jobs)
    about = (
        f"{config.choice} on {config.workload}, {recorded.world_size} ranks on {recorded.kind}: the most memory of "
        "rank 0 in a step. PREDICTED but for the column measured: the strategies' own code on tensors without data."
    )
    console.print(about)
    console.print(
        "",
        printed(
            frame[frame["note"] == ""], {name: column for name, column in SAVINGS_COLUMNS.items() if name != "note"}
        ),
        "",
    )
    for row in frame[frame["note"] != ""].to_dict("records"):
        console.print(f"{row['setting']}: {row['note']}")
    if options.csv is not None:
        write(options.csv, "--csv", frame.to_csv(index=False))
