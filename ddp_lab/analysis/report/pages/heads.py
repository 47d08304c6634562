"""The first lines of a page: what a reader must know before any figure."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_lab.analysis.comparison.fairness import Difference, affected
from ddp_lab.analysis.sentences import say
from ddp_lab.record_format import SHARED_GPU
from ddp_lab.runtime.config import FLAGS
from ddp_lab.runtime.settings.field import is_given


def labels(record: dict[str, Any] | None) -> list[str]:
    """Sentences on settings that change what is compared, and on what the run decided; none for an ordinary run."""
    if record is None:
        return []
    config, lines = {field.name: field.default for field in FLAGS} | record["config"], []
    if record.get("gpu_sharing"):
        lines.append(f"{record['gpu_sharing']}: {SHARED_GPU}.")
    for field in FLAGS:
        head, value = field.metadata["head"], config[field.name]
        text = head if isinstance(head, str) else head.get(value, "")
        if text and is_given(value):
            lines.append(text.format(**config, world_size=record["world_size"]))
    return lines + [f"{record['choice']}: {note}." for note in record.get("notes", [])]


def banner(differences: Sequence[Difference], subject: str) -> str:
    """A warning if the runs differ in more than `subject`; else empty."""
    if not differences:
        return ""
    return say("banner", differences, affected(differences), subject)


def audit_lines(failed_checks: Mapping[str, Sequence[str]]) -> list[str]:
    """A warning for each run with failed audit checks (`failed_checks`: their subjects by name of the run)."""
    return [say("failed_audit", name, subjects) for name, subjects in failed_checks.items() if subjects]
