"""The environment and the flags with which a verification starts its runs."""

import sys
from pathlib import Path

import pytest

from ftrun.cli.launch.command_line import parse
from ftrun.cli.run import build_spec
from ftrun.config.run_spec import RunSpec
from ftrun.tools.verify.runs import variables_of_run, words_of_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ftrun starts runs on Linux only")

HOOKS = """\
hooks: {on_incident: mail me, webhook: "https://example.org/x"}
checkpoint: {directory: /data/run1}
"""


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "mine.yaml").write_text(HOOKS)
    monkeypatch.chdir(tmp_path)


def spec_of(*words: str, **variables: str) -> RunSpec:
    line = parse(words_of_run("verify-1", words))
    return build_spec(line, variables=variables_of_run(variables))


@pytest.mark.parametrize("name", ["FTRUN_MAX_RESTARTS", "PET_MAX_RESTARTS"])
def test_a_limit_of_restarts_in_the_environment_does_not_apply(name: str) -> None:
    assert spec_of("train.py", **{name: "0"}).max_restarts is None


def test_hooks_and_checkpoints_of_a_profile_are_off() -> None:
    profile = spec_of("--profile=mine.yaml", "train.py").profile
    assert (profile.hooks.on_incident, profile.hooks.webhook) == (None, None)
    assert profile.checkpoint.directory is None


def test_hooks_of_variables_are_off() -> None:
    found = spec_of("train.py", FTRUN_HOOKS_ON_INCIDENT="mail me", FTRUN_PROFILE="mine.yaml")
    assert found.profile.hooks.on_incident is None


def test_other_variables_and_flags_reach_the_run() -> None:
    found = spec_of("--set=hang.kill_after_s=60", "train.py", FTRUN_SMP_ORPHAN_TIMEOUT_S="7")
    assert found.run_id == "verify-1"
    assert found.profile.hang.kill_after_s == 60
    assert found.profile.smp.orphan_timeout_s == 7
    assert (found.profile.snapshot.every, found.profile.stop.grace_s) == (1, 2)
