"""Report on traces of a mesh: python scripts/analyze_traces_parallel.py --trace-dir profile/zero3@dp2-tp2"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddp_lab.analysis.command import main

if __name__ == "__main__":
    sys.exit(main("reports_parallel"))
