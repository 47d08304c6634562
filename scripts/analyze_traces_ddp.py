"""Report on the traces of a replicated choice: python scripts/analyze_traces_ddp.py --trace-dir profile/simple_ddp"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddp_lab.analysis.command import main

if __name__ == "__main__":
    sys.exit(main("reports"))
