"""Law: folders of C++ code and of Python import one another in one direction."""

import ast
import graphlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

#: From the lowest layer to the highest: a source includes those of layers below its own, and of its
#: own room. A path is in the first room whose pattern it matches.
LAYERS = [
    {"rules": "fusedstep/"},
    {"core": "src/core/"},
    {
        "CPU kernels": "cpu_kernels/",
        "CUDA kernels": "cuda_kernels/",
        "plans": r"src/plan/|src/run/(load_balance|session|tuning)\.",
    },
    {"steps": r"src/steps/|src/run/(backend|cuda_library|dispatch|isa|product_chain)\."},
    {"CUDA steps": "src/cuda/"},
    {"operators": "src/ops/"},
    {"Python": "src/python/"},
]
SOURCES = sorted(
    path
    for folder in ("include", "src", "cpu_kernels", "cuda_kernels")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".h", ".cpp", ".cu", ".cuh"}
)


def place(path: str) -> tuple[int, str]:
    """The number of the layer, and the room in it."""
    for level, rooms in enumerate(LAYERS):
        for room, pattern in rooms.items():
            if re.match(pattern, path):
                return level, room
    pytest.fail(f"{path} is in no layer")


def may_include(includer: str, included: str) -> bool:
    (level, room), (below, other) = place(includer), place(included)
    return below < level or (below, other) == (level, room)


def includes(source: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+"([^"]+)"', source.read_text(), re.MULTILINE)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_includes_point_one_way(source):
    name = str(source.relative_to(ROOT)).removeprefix("include/")
    place(name)
    for included in includes(source):
        assert (ROOT / included).exists() or (ROOT / "include" / included).exists(), included
        assert may_include(name, included), f"{name} includes {included}"


def test_every_layer_has_sources():
    names = [str(source.relative_to(ROOT)).removeprefix("include/") for source in SOURCES]
    rooms = {(level, room) for level, layer in enumerate(LAYERS) for room in layer}
    assert {place(name) for name in names} == rooms
    assert sum(len(includes(source)) for source in SOURCES) > 100


@pytest.mark.parametrize(
    ("includer", "included"),
    [
        ("src/core/task.h", "cpu_kernels/kernel_table.h"),
        ("src/plan/plan.h", "cpu_kernels/kernel_table.h"),
        ("src/plan/layout.cpp", "cuda_kernels/kernel_table.h"),
        ("cpu_kernels/tiles.h", "src/plan/layout.h"),
        ("cuda_kernels/walk.cuh", "cpu_kernels/tiles.h"),
        ("src/plan/plan.cpp", "src/steps/step.h"),
        ("src/steps/step.cpp", "src/ops/native_plan.h"),
        ("src/ops/library.cpp", "src/python/bind.cpp"),
        ("fusedstep/vocabulary.h", "src/core/walk.h"),
    ],
)
def test_an_include_against_the_direction_is_seen(includer, included):
    assert not may_include(includer, included)
    assert may_include(included, included)


PACKAGE = ROOT / "python"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}

#: Folders of the Python package, from the lowest floor to the highest: a module imports modules of
#: its own folder, and of lower floors.
FLOORS = [
    {"_version"},
    {"_native", "_options"},
    {"_sharding"},
    {"_state"},
    {"_step"},
    {"_torch_ops"},
    {"_matrix", "_factored"},
    {"_api"},
    {"optim"},  # the classes
    {"_models"},
    {"optim.__init__"},
]
#: Above all floors: what is used beside a step, in the order of their imports.
TOOLS = {"backward", "convert", "doctor", "gain", "galore", "integrations", "memory", "offload"}
TOOLS |= {"verify", "__main__", "__init__"}


def floor(module: str) -> tuple[int, str]:
    """The number of the floor of a module, and its folder."""
    path = MODULES[module].relative_to(PACKAGE / "fusedstep").with_suffix("")
    folder = "optim.__init__" if str(path) == "optim/__init__" else path.parts[0]
    for level, folders in enumerate(FLOORS):
        if folder in folders:
            return level, folder
    assert folder in TOOLS, f"{path} is on no floor"
    return len(FLOORS), "tools"


def may_import(importer: str, imported: str) -> bool:
    (level, folder), (below, other) = floor(importer), floor(imported)
    return below < level or (below, other) == (level, folder)


def imports(module: str) -> set[str]:
    """Modules of the package that a module imports anywhere: in functions, and for types too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else node.module)
    return found & MODULES.keys()


def assert_no_circle(graph):
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_modules_import_one_another_in_one_direction():
    graph = {module: imports(module) for module in MODULES}
    assert graph["fusedstep._api.update"] > {"fusedstep._native.ops", "fusedstep._step.step"}
    assert_no_circle(graph)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    for imported in imports(module):
        assert may_import(module, imported), f"{module} imports {imported}"


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("fusedstep._state.states", "fusedstep._step.plan"),
        ("fusedstep._matrix.arrangement", "fusedstep._factored.moments"),
        ("fusedstep._api.base", "fusedstep.optim.adam"),
        ("fusedstep.optim.adam", "fusedstep.optim"),
        ("fusedstep.optim.adam", "fusedstep.convert"),
    ],
)
def test_an_import_that_goes_up_is_seen(importer, imported):
    assert not may_import(importer, imported)
    assert may_import(imported, imported)


TESTS = [
    path.relative_to(ROOT / "tests")
    for path in (ROOT / "tests").rglob("*.py")
    if path.name.startswith("test_")
]


def test_every_test_file_has_a_folder_and_a_name_of_its_own():
    """But for those of frameworks: pytest imports these in a run of their own."""
    assert [str(path) for path in TESTS if len(path.parts) == 1] == []
    names = [path.name for path in TESTS if path.parts[0] != "frameworks"]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("folder", ["tests", "bench", "examples"])
def test_no_test_file_is_imported(folder):
    """What several test files need is in tests/support."""
    names = {path.stem for path in TESTS}
    for path in (ROOT / folder).rglob("*.py"):
        for line in path.read_text().splitlines():
            word = re.match(r" *(?:from|import) (?:[\w.]+\.)?(test_\w+)", line)
            assert not word or word[1] not in names, f"{path}: {line}"


#: Folders of the benchmark, from the lowest: a module imports those of folders below, and its own.
BENCH = ("harness", "suites", "reports")


def test_the_benchmark_imports_down():
    graph = {}
    for path in (ROOT / "bench").glob("*/*.py"):
        if path.parent.name not in BENCH:
            continue
        module = f"{path.parent.name}.{path.stem}"
        found = re.findall(
            r"^from (\w+)(?:\.(\w+))? import ([\w, ]+)", path.read_text(), re.MULTILINE
        )
        for folder, name, names in found:
            if folder in BENCH:
                assert BENCH.index(folder) <= BENCH.index(path.parent.name), f"{module}: {folder}"
                modules = [name] if name else names.split(", ")
                graph.setdefault(module, set()).update(f"{folder}.{each}" for each in modules)
    assert len(graph) > 10
    assert_no_circle(graph)


def test_what_scripts_import_of_the_package_is_there():
    for folder in ("bench", "examples", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fusedstep"):
                    module = importlib.import_module(node.module)
                    for name in node.names:
                        inner = f"{node.module}.{name.name}"
                        is_module = hasattr(module, "__path__") and importlib.util.find_spec(inner)
                        assert hasattr(module, name.name) or is_module, f"{path}: {inner}"
