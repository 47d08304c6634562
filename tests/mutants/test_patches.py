"""Every mutant can still be planted (`tests/mutants/run.py`): who changes its lines carries it along."""

import subprocess

import pytest

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


def test_a_patch_that_fits_no_more_is_refused(tmp_path):
    file = tmp_path / "01-plus.patch"
    file.write_text("# Wrong.\n# tests: tests\n--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n")
    assert Mutant.read(file).applied("a\nb\n") == "a\nc\n"
    for source in ("a\nd\n", "a\nb\na\nb\n"):
        with pytest.raises(ValueError, match="make the patch again"):
            Mutant.read(file).applied(source)
    file.write_text(file.read_text() + "@@ -7,1 +7,1 @@\n-b\n+c\n")
    with pytest.raises(ValueError, match="one hunk"):
        Mutant.read(file)
