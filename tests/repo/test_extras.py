"""The extras of pyproject.toml list what is imported."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys

import pytest

tomllib = pytest.importorskip("tomllib")


FOLDERS = ("tests", "bench", "examples")
#: Packages of the repository: folders that are on the path of the programs there.
ROOMS = {
    *("fusedstep", "fuzz", "optimizers", "reference", "support"),
    *("harness", "probes", "reports", "suites"),
}


def modules(folder):
    """The first words of what the folder's files import."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module.partition(".")[0]


@pytest.mark.parametrize(
    ("extras", "folders"),
    [(["test", "frameworks", "peers"], FOLDERS), (["bench", "frameworks", "peers"], ["bench"])],
)
def test_extras_list_what_is_imported(extras, folders, repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + [
        requirement for extra in extras for requirement in project["optional-dependencies"][extra]
    ]
    listed = {re.split(r"[><=]", each)[0].replace("-", "_") for each in requirements}
    own = [path for name in (*FOLDERS, "scripts") for path in (repository / name).rglob("*.py")]
    ours = {path.stem for path in own} | ROOMS
    aside = {"megatron"}  # scripts/install.sh puts it into a folder of its own
    distributions = importlib.metadata.packages_distributions()
    for folder in folders:
        for module in set(modules(repository / folder)) - ours - aside - sys.stdlib_module_names:
            names = {name.replace("-", "_") for name in distributions.get(module, [module])}
            assert listed & names, f"{folder} imports {module}"


def test_requirements_that_are_met_are_told_from_others(tmp_path, repository):
    """With extras and bounds on both sides, as pyproject.toml has them."""
    version = importlib.metadata.version("pytest")
    met = ["pytest", "pytest>=8", "pytest[dev]>=8", f"pytest>={version},<999"]
    unmet = ["pytest>=999", "pytest[dev]>=999", "pytest>=1,<2", "nobody-has-this>=1"]
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(repository / "scripts" / "missing_packages.py", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text(
        f"[project]\ndependencies = []\noptional-dependencies.some = {met + unmet}\n"
    )
    done = subprocess.run(
        [sys.executable, script, "some"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == unmet
