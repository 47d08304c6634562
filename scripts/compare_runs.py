"""Report on all choices that have been trained already, and compare them: python scripts/compare_runs.py sharding"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from analysis.choices import report_on_choices
from analysis.errors import TraceError
from scripts.families import FAMILIES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("family", choices=FAMILIES, help="whose choices: of main_ddp.py or of main_shard.py")
    parser.add_argument("--output-dir", type=Path, default=Path(), help="root of profile/ and of the reports")
    options = parser.parse_args()
    family = FAMILIES[options.family]
    trained = [name for name in family.registry.sentences if (options.output_dir / "profile" / name).is_dir()]
    try:
        page = report_on_choices(options.output_dir, family.report_root, trained, failed=[])
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\nreport: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
