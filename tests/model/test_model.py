"""The models of leases, lines, enqueueing and runs: the design holds in every schedule.

Mutants of the design do not. Guarantees as much as `Taskguard.tla`, `Line.tla`, `Enqueue.tla`,
`Runs.tla` and `Operators.tla` model. The comments at their tops say what they model, and what they
leave out.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from model.check import CONFIGURATIONS, HERE, check, expected_of, missing_tool, module_of

from support.exploration import Exploration

# A minute or so of a processor, which may be a busy one.
pytestmark = pytest.mark.timeout(1500)

DESIGN = [name for name in CONFIGURATIONS if expected_of(name) == "holds"]
# Each takes long.
LONG = (
    "line_expiry_hints",
    "line_expiry_relay",
    "line_latest",
    "line_latest_liveness",
    "line_liveness",
    "line_rates_liveness",
    "line_slots",
    "line_strict",
    "line_strict_liveness",
    "line_supersede",
)
# Each takes long with a fault.
CALM = (
    "line_canvas",
    "line_expiry",
    "line_faults",
    "line_hint_faults",
    "line_hints",
    "line_latest_rates",
    "line_rates",
    "line_strict_rates",
    "line_supersede_rates",
    "line_twice",
    "liveness",
)
MUTANTS = [name for name in CONFIGURATIONS if expected_of(name) != "holds"]


@pytest.fixture
def tlc() -> None:
    """Skips where TLC cannot run: neither Java nor the jar is needed by anything else."""
    reason = missing_tool()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.usefixtures("tlc")
@pytest.mark.parametrize("name", DESIGN)
def test_the_design_holds(name: str, exploration: Exploration) -> None:
    """No schedule of the configuration violates an invariant; fair ones end with all work DONE.

    Here with one fault, or none, in `make explore` with as many as the configuration names.
    """
    if name in LONG and not exploration.whole:
        pytest.skip("a part of `make explore`")
    checked = check(name, faults=None if exploration.whole else int(name not in CALM))
    assert checked.found == "holds", checked.output
    # A model that allows nothing holds as well.
    assert checked.states > (2_000 if exploration.whole else 800)


@pytest.mark.usefixtures("tlc")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found_out(name: str) -> None:
    """The design with one rule taken away violates just what that rule is there for."""
    checked = check(name)
    assert checked.found == expected_of(name), checked.output


@pytest.mark.parametrize(
    ("module", "count"),
    [
        ("Taskguard.tla", 13),
        ("Line.tla", 31),
        ("Enqueue.tla", 7),
        ("Runs.tla", 17),
        ("Operators.tla", 6),
    ],
)
def test_every_mutant_of_a_model_has_a_configuration(module: str, count: int) -> None:
    """Each value that the constant `Mutant` may take is switched on by one of the files."""
    model = (HERE / module).read_text(encoding="utf-8")
    _, _, rest = model.partition("ASSUME Mutant")
    switches = {
        line.split('"')[1] for line in rest.split("VARIABLES")[0].splitlines() if '"' in line
    }
    used = {
        line.split('"')[1]
        for name in CONFIGURATIONS
        if module_of(name) == module
        for line in (HERE / f"{name}.cfg").read_text(encoding="utf-8").splitlines()
        if "Mutant =" in line
    }
    assert used == switches
    assert len(switches) == count


@pytest.mark.usefixtures("tlc")
def test_the_command_says_what_it_found() -> None:
    """A line for each configuration, and 1 if one of them is not as its file says."""
    command = [sys.executable, str(HERE / "check.py"), "early_ack"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "early_ack                  violated: S7        violated: S7" in done.stdout
    # Without a fault no worker is paused, and the missing check does no harm.
    command = [sys.executable, str(HERE / "check.py"), "--faults", "0", "no_fence_check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no_fence_check             violated: S3        holds" in done.stdout
