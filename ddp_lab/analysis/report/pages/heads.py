"""The first lines of a page: what a reader must know before any figure."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_lab.analysis.comparison.fairness import Difference, affected
from ddp_lab.record_format import SHARED_GPU


def labels(record: dict[str, Any] | None) -> list[str]:
    """Sentences on settings that change what is compared, and on what the run decided; none for an ordinary run."""
    if record is None:
        return []
    config, lines = record["config"], []
    if record.get("gpu_sharing"):
        lines.append(f"{record['gpu_sharing']}: {SHARED_GPU}.")
    if config.get("compress"):
        lines.append(
            f"Gradients are compressed ({config['compress']}): what is reduced is rounded, so this is not the same "
            "training as without compression, and its times and bytes cannot be compared with it."
        )
    if config.get("precision") == "bf16-true":
        lines.append(
            "Parameters, gradients and optimizer states are in bf16. This is lossy: an update below half a unit in the "
            "last place of a weight is lost."
        )
    elif config.get("param_dtype"):
        lines.append(
            f"Parameters are gathered and computed with in {config['param_dtype']}, and updated in their own dtype: "
            "activations and gradients are rounded, and losses differ from those of fp32."
        )
    if config.get("reduce_dtype") == "bf16":
        lines.append("Gradients are rounded to bf16 before they are added up over ranks.")
    if config.get("compile"):
        lines.append("Blocks of the model were compiled with torch.compile.")
    if config.get("profile_ranks"):
        lines.append(
            f"Profiled ranks: {config['profile_ranks']}, of {record['world_size']} in all. Figures of traces are "
            "theirs, and it is unknown for which rank a collective waited, and how fast it was."
        )
    if config.get("link", "none") != "none":
        nodes = config.get("nodes")
        between = f", and one of {config['outer_link']} between {nodes} nodes (--outer-link)" if nodes else ""
        lines.append(
            f"Every rank had a link of {config['link']} (--link){between}: a collective ended no earlier than such "
            "links could have delivered it."
        )
    return lines + [f"{record['choice']}: {note}." for note in record.get("notes", [])]


def banner(differences: Sequence[Difference], what: str) -> str:
    """A warning if the runs differ in more than `what`; else empty."""
    if not differences:
        return ""
    settings = "; ".join(f"{found.name} ({found.listed})" for found in differences)
    figures = ", ".join(affected(differences))
    return f"These runs differ in more than their {what}: {settings}. These figures cannot be compared: {figures}."


def audit_lines(failed_checks: Mapping[str, Sequence[str]]) -> list[str]:
    """A warning for each run with failed audit checks (`failed_checks`: their subjects by name of the run)."""
    return [
        f"Warning: {name} does not do what its own formula and configuration say: {', '.join(subjects)} "
        f"(audit.csv and summary.html in its folder)."
        for name, subjects in failed_checks.items()
        if subjects
    ]
