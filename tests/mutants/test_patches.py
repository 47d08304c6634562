"""Every mutant can still be planted (`tests/mutants/run.py`): who changes its lines carries it along."""

import subprocess

from tests.mutants.patches import FOLDER, ROOT, Mutant


def test_each_applies_and_compiles():
    files = sorted(FOLDER.glob("*.patch"))
    assert [file.name[:2] for file in files] == [f"{number:02}" for number in range(1, 41)]
    for file in files:
        mutant = Mutant.read(file)
        source = (ROOT / mutant.path).read_text()
        faulty = mutant.applied(source)
        assert faulty != source
        compile(faulty, mutant.path, "exec")
        subprocess.run(["git", "apply", "--check", file], cwd=ROOT, check=True)
