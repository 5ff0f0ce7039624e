"""The command line starts quickly and the stub stays small: tests which modules each one loads."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "pydantic", "rich", "yaml", "msgspec", "jinja2")


def loaded_by(code: str) -> set[str]:
    """The heavy modules that are loaded after the code has run in a new process."""
    probe = f"import sys\n{code}\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    command = [sys.executable, "-c", probe]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    return set(eval(done.stdout.splitlines()[-1]))  # our own probe's list of names


@pytest.mark.parametrize("module", ["ftrun", "ftrun.cli.app", "ftrun.cli.stub"])
def test_module_loads_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}") == set()


def test_the_smp_loads_no_numpy() -> None:
    assert loaded_by("import ftrun.smp.__main__") == {"msgspec"}


def help_loads(*words: str) -> set[str]:
    code = (
        f"import sys\nfrom ftrun.cli.app import main\nsys.argv = ['ftrun', *{words}, '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert ('ftrun.tools' in sys.modules) == ('verify' in sys.argv)"
    )
    return loaded_by(code)


def test_help_loads_nothing_heavy() -> None:
    assert help_loads() == set()


def test_help_of_a_command_loads_little() -> None:
    assert help_loads("verify") <= {"pydantic"}  # which newer versions of typer load


@pytest.mark.parametrize(
    "module",
    [
        *("ftrun.cli.run", "ftrun.cli.commands.status", "ftrun.smp.server"),
        *("ftrun.wire.transport.channel", "ftrun.config.run_spec"),
        *("ftrun.tools.checkpoints.command", "ftrun.tools.export.__main__"),
        *("ftrun.tools.checkpoints.convert", "ftrun.worker.process.startup"),
        "ftrun.tools.explain.command",
    ],
)
def test_module_does_not_load_torch(module: str) -> None:
    assert "torch" not in loaded_by(f"import {module}")


@pytest.mark.parametrize("module", ["ftrun.smp.server", "ftrun.wire.transport.channel"])
def test_what_many_processes_load_is_small(module: str) -> None:
    assert not loaded_by(f"import {module}") & {"torch", "pydantic", "rich"}


def test_metrics_cost_nothing_where_they_are_off() -> None:
    code = "import ftrun.agent.launcher\nassert 'prometheus_client' not in sys.modules"
    loaded = loaded_by(code)
    assert "torch" in loaded
    assert "pydantic" not in loaded, "the agent after a killed one starts sooner"
