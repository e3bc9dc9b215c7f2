"""Law: `import fusedstep` and a step bring nothing along beside torch.

docs/performance.md has the time of the import.
"""

import json
import subprocess
import sys

PROGRAM = """
import json, sys
import torch
before = set(sys.modules)
import fusedstep
print(json.dumps(sorted(set(sys.modules) - before)))

weight = torch.nn.Parameter(torch.ones(5))
optimizer = fusedstep.optim.Adam([weight])
weight.grad = torch.ones(5)
optimizer.step()
optimizer.zero_grad()
assert "torch._dynamo" not in sys.modules, "imported, which takes longer than torch"
"""

#: Parts that are imported by those who use them.
LATER = ("fusedstep.galore", "fusedstep.integrations", "fusedstep.memory")


def test_only_modules_of_the_package_are_imported_and_nothing_is_said(subprocess_environment):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env=subprocess_environment,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    assert done.stderr == ""
    assert [name for name in json.loads(line) if name.split(".")[0] != "fusedstep"] == []
    assert [name for name in json.loads(line) if name.startswith(LATER)] == []
