"""Profiles: all errors are reported at once, later layers override, each value has its origin."""

from pathlib import Path

import pytest

from ftrun.cli.launch.profiles import (
    INTERNAL_NAMES,
    MAX_PROFILE_BYTES,
    SettingValue,
    find_profile,
    key_type,
    known_keys,
    plain_value,
    profile_names,
    read_profile,
    resolve,
    setting_from_text,
    variable_name,
)
from ftrun.config.checks import description_of
from ftrun.config.profile import RENAMED_KEYS, Profile
from ftrun.erasure.codec import MAX_DATA, MAX_PARITY
from ftrun.errors import ProfileInvalid, UsageError


def profile(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


def problems(name: str, **variables: str) -> str:
    with pytest.raises(ProfileInvalid) as caught:
        resolve(name, variables=variables)
    return "\n".join(caught.value.problems)


def test_default_profile_reports_what_holds_without_one() -> None:
    resolved = resolve("default", variables={})
    assert resolved.profile == Profile() == resolve(None, variables={}).profile
    assert set(resolved.origins) == {f"{section}.{key}" for section, key in known_keys()}


def test_each_renamed_key_is_refused_with_its_new_name(tmp_path: Path) -> None:
    known = {f"{section}.{key}" for section, key in known_keys()}
    assert set(RENAMED_KEYS.values()) <= known
    assert not known & RENAMED_KEYS.keys()
    for old, new in RENAMED_KEYS.items():
        section, _, key = old.partition(".")
        path = profile(tmp_path, f"{section}:\n  {key}: 1\n")
        message = f"{old}: is now {new}"
        assert problems(path).endswith(f"mine.yaml:2: {message}")
        variable = variable_name(section, key)
        assert problems("default", **{variable: "1"}) == f"environment {variable}: {message}"
        with pytest.raises(ProfileInvalid, match=f"--set {old}=1: {message}"):
            resolve(None, variables={}, flags=[setting_from_text(f"{old}=1")])


@pytest.mark.parametrize("name", profile_names())
def test_packaged_profile_is_valid_and_explains_itself(name: str) -> None:
    resolve(name, variables={})
    assert find_profile(name).read_text().startswith("# ")


def test_packaged_profiles_are_three() -> None:
    assert profile_names() == ["default", "laptop", "single-node-gpu"]


def test_later_layer_wins_and_is_reported(tmp_path: Path) -> None:
    name = profile(tmp_path, "restart:\n  budget: 1\n  window_s: 5\nsmp:\n  orphan_timeout_s: 9\n")
    resolved = resolve(
        name,
        variables={"FTRUN_RESTART_BUDGET": "2", "FTRUN_RESTART_WINDOW_S": "6"},
        flags=[SettingValue("restart", "budget", 3, "--set")],
    )
    assert resolved.profile.restart.budget == 3
    assert resolved.profile.restart.window_s == 6
    assert resolved.profile.smp.orphan_timeout_s == 9
    assert resolved.origins["restart.budget"] == "--set"
    assert resolved.origins["restart.window_s"] == "environment FTRUN_RESTART_WINDOW_S"
    assert resolved.origins["smp.orphan_timeout_s"] == f"{name}:5"


def test_all_that_is_wrong_is_listed_at_once(tmp_path: Path) -> None:
    name = profile(
        tmp_path,
        "snapshot:\n  evry: 3\n  every: often\n  enabled: 3\nrestrt:\n  budget: 3\nsmp: 5\n"
        "stop:\n  grace_s: -1\n  forward_signals: [USR9]\n  forward_signals: [USR8]\nnonsense: 3\n",
    )
    text = problems(name, FTRUN_RESTART_BUDGET="many", FTRUN_SNAPSHOT_EVERY="0")
    for said in (
        f"{name}:2: snapshot.evry: there is no such key; did you mean every?",
        f"{name}:3: snapshot.every: should be auto or a whole number of at least 1, and is 'often'",
        f"{name}:4: snapshot.enabled: should be true or false, and is 3",
        f"{name}:6: restrt: there is no such section; did you mean restart?",
        "line 7: smp: should hold keys with values",
        f"{name}:9: stop.grace_s: should be a number above 0, and is -1",
        "line 11: forward_signals occurs twice",
        f"{name}:11: stop.forward_signals: 'USR8' cannot be forwarded",
        "line 12: nonsense: there is no such section",
        "environment FTRUN_RESTART_BUDGET: restart.budget: should be a whole number of at least 0",
        "environment FTRUN_SNAPSHOT_EVERY: snapshot.every: should be auto or a whole number",
    ):
        assert said in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("snapshot: &a\n  every: 3\nstart: *a\n", "line 3: aliases are not allowed"),
        ("snapshot:\n  every: !!python/object:os.system x\n", "line 2: could not determine"),
        ("snapshot: [\n", "line 2"),
        ("- snapshot\n", "line 1: a profile: should hold keys"),
        ("# " + "x" * MAX_PROFILE_BYTES, "bytes"),
        ("snapshot:\n  xyzzy: 1\n", "snapshot.xyzzy: there is no such key; there are enabled,"),
    ],
)
def test_what_cannot_be_read_is_reported(tmp_path: Path, text: str, said: str) -> None:
    assert said in problems(profile(tmp_path, text))


def test_error_patterns_are_texts_by_name(tmp_path: Path) -> None:
    text = "monitor:\n  error_patterns: {quota: 'quota*exceeded'}\n"
    found = resolve(profile(tmp_path, text), variables={}).profile.monitor
    assert found.error_patterns == {"quota": "quota*exceeded"}
    for wrong in ("[quota]", "{quota: [1]}", "{quota: ''}"):
        text = f"monitor:\n  error_patterns: {wrong}\n"
        assert "should be names with patterns that are not empty, and is" in problems(
            profile(tmp_path, text)
        )


@pytest.mark.parametrize("text", ["", "# nothing\n", "snapshot:\n", "{}"])
def test_empty_profile_is_one(tmp_path: Path, text: str) -> None:
    assert resolve(profile(tmp_path, text), variables={}).profile == Profile()


def test_unknown_name_is_answered_with_the_near_one() -> None:
    with pytest.raises(UsageError) as caught:
        find_profile("labtop")
    assert "Did you mean laptop?" in str(caught.value)


def test_variables_of_workers_are_not_settings() -> None:
    assert not INTERNAL_NAMES & {variable_name(section, key) for section, key in known_keys()}
    assert "FTRUN_RUN_ID" in INTERNAL_NAMES
    assert resolve(None, variables=dict.fromkeys(INTERNAL_NAMES, "x")).profile == Profile()


def test_set_reads_plain_values() -> None:
    assert setting_from_text("snapshot.every=5").value == 5
    assert setting_from_text("start.preload=[a, b]").value == ["a", "b"]
    assert setting_from_text("checkpoint.directory=/x=y").value == "/x=y"
    assert plain_value("a: b: c") == "a: b: c"


@pytest.mark.parametrize("text", ["snapshot", "snapshot.every", "every=5", "snapshot.=5"])
def test_set_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        setting_from_text(text)


def test_the_limit_of_a_scheme_is_that_of_the_codec() -> None:
    most = f"{MAX_DATA}+{MAX_PARITY}"
    assert most in description_of(key_type("erasure", "scheme"))
    assert resolve(None, variables={"FTRUN_ERASURE_SCHEME": most}).profile.erasure.scheme == most
    for scheme in (f"{MAX_DATA + 1}+1", f"1+{MAX_PARITY + 1}"):
        said = problems("default", FTRUN_ERASURE_SCHEME=scheme)
        assert said.endswith(f"erasure.scheme: should be at most {most}, and is {scheme}")


def test_lines_are_kept(tmp_path: Path) -> None:
    layer = read_profile(Path(profile(tmp_path, "# x\n\nsmp:\n\n  orphan_timeout_s: 3\n")))
    assert [setting.origin.rpartition(":")[2] for setting in layer.settings] == ["5"]
