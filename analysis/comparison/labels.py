"""What a reader must know of a run before its figures: settings that change what is compared, and what it decided."""

from typing import Any


def labels(record: dict[str, Any] | None) -> list[str]:
    """Sentences for the head of a page; none for an ordinary run, or where there is no run record."""
    if record is None:
        return []
    config, lines = record["config"], []
    if config.get("compress"):
        lines.append(
            f"Gradients are compressed ({config['compress']}): what is reduced is rounded, so this is not the same "
            "training as without, and its times and bytes do not compare with it."
        )
    if config.get("overlap_optimizer"):
        lines.append("Parameters of a bucket are updated while other buckets are still being reduced.")
    if record.get("link_bits_per_s"):
        lines.append(f"Each node's link was shaped to {record['link_bits_per_s'] / 1e6:g} Mbit/s.")
    return lines + [f"{record['choice']}: {note}." for note in record.get("notes", [])]
