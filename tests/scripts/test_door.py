"""`ddp-lab`: what it offers, how fast it says so, and that `train` starts its own ranks."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ddp_lab.__main__ import help_text, main
from ddp_lab.commands import COMMANDS
from tests.command_page import section

ROOT = Path(__file__).parents[2]


def test_help_has_every_command_with_an_example_and_loads_nothing_heavy():
    """That keeps it under a second."""
    code = "import sys; from ddp_lab.__main__ import main; main(['--help']);"
    code += "print([name for name in ('torch', 'pandas', 'numpy', 'rich', 'transformers') if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.stdout == help_text() + "\n[]\n"
    for name, command in COMMANDS.items():
        assert f"  {name} " in answer.stdout and f"ddp-lab {name} {command.example}\n" in answer.stdout
        assert command.load().build_parser().format_usage().startswith(f"usage: ddp-lab {name} ")


def test_docs_list_every_command():
    cells = re.findall(r"^\| (`.+?) \|", section("ddp-lab"), re.MULTILINE)
    documented = re.findall(r"`([a-z-]+)[ A-Z]*`", "".join(cells))
    assert sorted(documented) == sorted([*COMMANDS, "completion"])


def test_a_shell_completes_commands_and_flags(tmp_path, capsys):
    script = tmp_path / "completion.bash"
    assert main(["completion", "bash"]) == 0
    script.write_text(capsys.readouterr().out)
    ask = (
        f"source {script}; COMP_WORDS=(ddp-lab train --grad-acc); COMP_CWORD=2; _shtab_ddp_lab; echo ${{COMPREPLY[@]}}"
    )
    answer = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=20)
    assert answer.stdout == "--grad-accum-steps\n", answer.stderr


@pytest.mark.slow
def test_a_wheel_has_the_rooms_alone(tmp_path):
    """Nothing with a name that others use too gets into a user's site-packages."""
    subprocess.run(["uv", "build", "-q", "--wheel", "--out-dir", str(tmp_path)], cwd=ROOT, check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    rooms = {name for name in names if not name.endswith(".dist-info")}
    strategies = {"ddp", "sharding", "reference"}
    strategies |= {f"{kind}_parallel" for kind in ("tensor", "pipeline", "context", "expert")}
    assert rooms == {"ddp_lab", *strategies}
