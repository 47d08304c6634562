#!/usr/bin/env bash
# Run ddp-lab in an environment that has its packages: the active one if it has them (as on a cluster), else the locked
# one, which uv makes.   scripts/in_environment.sh sweep ddp 2
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
packages='"torch", "transformers", "datasets", "hta", "psutil", "plotly", "jinja2", "rich", "msgspec", "safetensors", "tomli_w"'
has_packages="import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ($packages))))"
if command -v python >/dev/null && python -c "$has_packages" 2>/dev/null; then
  PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec python -m ddp_lab "$@"
elif command -v uv >/dev/null; then
  exec uv run --project "$root" --no-dev --inexact ddp-lab "$@"
fi
echo "error: torch and the other packages are not installed here; run: pip install uv" >&2
exit 1
