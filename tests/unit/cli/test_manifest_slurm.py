"""bash and sbatch can read a batch script, and its arguments are those that were typed."""

import itertools
import re
import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrun.errors import UsageError
from ftrun.tools.manifests.job import JobOptions, MachineSpec, job_of
from ftrun.tools.manifests.slurm import SlurmOptions, batch_script
from ftrun.tools.manifests.yaml_text import WIDTH

OF_SBATCH = {
    *("job-name", "nodes", "ntasks-per-node", "cpus-per-task", "exclusive", "gpus-per-node"),
    *("mem", "time", "no-kill", "signal", "requeue", "open-mode", "output", "partition"),
    *("account", "constraint", "qos"),
}
FOUR = "--nnodes 4 --spares 1 --nproc-per-node 8 --checkpoint-dir /shared/run1 train.py --lr 1e-4"


def script(
    words: str,
    machine: MachineSpec | None = None,
    place: SlurmOptions | None = None,
    name: str | None = None,
    time: str | None = None,
) -> str:
    job = job_of(words.split(), machine or MachineSpec(), JobOptions(name, time))
    return batch_script(job, place or SlurmOptions())


def directives(text: str) -> dict[str, str]:
    """As sbatch reads them: from the lines before the first command."""
    head = list(iter_header(text))
    found = [shlex.split(line.removeprefix("#SBATCH ")) for line in head if "#SBATCH" in line]
    pairs = [word.removeprefix("--").partition("=") for words in found for word in words]
    assert len({name for name, _, _ in pairs}) == len(pairs)
    return {name: value for name, _, value in pairs}


def iter_header(text: str) -> list[str]:
    lines = text.splitlines()
    end = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[end:])
    return lines[:end]


def command(text: str, name: str = "ftrun") -> list[str]:
    """The arguments of a command of the script, as bash passes them."""
    body = text[text.index("\nsrun ") :].partition("\n\ncode=")[0]
    shown = 'srun() { printf "%s\\0" srun "$@"; }\nSLURM_JOB_ID=4711\n'
    done = subprocess.run(["bash", "-c", shown + body], capture_output=True, check=True)
    words = done.stdout.decode().split("\0")[:-1]
    return words[words.index(name) :]


def check_bash(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_four_nodes_and_a_spare() -> None:
    machine = MachineSpec(cpus=64, gpus=8, memory="500Gi", state="75Mi")
    text = script(FOUR, machine, SlurmOptions("main", "us", 9, ["--constraint=ib"]), time="36h")
    check_bash(text)
    assert max(map(len, text.splitlines())) <= WIDTH
    found = directives(text)
    assert set(found) <= OF_SBATCH
    assert found == {
        "job-name": "train",
        "nodes": "5",
        "ntasks-per-node": "1",
        "cpus-per-task": "64",
        "gpus-per-node": "8",
        "mem": f"{500 * 1024 + 1600 + 1024}M",  # 8 ranks, 2 (1 + 1/3) of 75Mi each
        "time": "1-12:00:00",
        "no-kill": "",
        "signal": "USR1@130",
        "requeue": "",
        "open-mode": "append",
        "output": "%x-%j.out",
        "partition": "main",
        "account": "us",
        "constraint": "ib",
    }
    srun = command(text, "srun")
    assert {"--no-kill", "--kill-on-bad-exit=0", "--cpus-per-task=64"} <= set(srun)
    assert command(text) == ["ftrun", "--run-id", "train-4711", *FOUR.split()]


def test_each_line_has_its_reason() -> None:
    lines = script(FOUR, MachineSpec(gpus=8), time="1d").splitlines()
    for above, line in itertools.pairwise(lines):
        if line.startswith("#SBATCH"):
            assert above.startswith("#"), line


def test_whole_nodes_where_no_part_is_asked_for() -> None:
    found = directives(script(FOUR))
    assert (found["exclusive"], found["mem"]) == ("", "0")
    assert "cpus-per-task" not in found
    assert "time" not in found


def test_one_node_has_nothing_of_several() -> None:
    text = script("--nproc-per-node 2 train.py")
    check_bash(text)
    assert "--no-kill" not in text
    assert "--kill-on-bad-exit" not in text
    assert "%t" not in text
    assert directives(text)["nodes"] == "1"
    assert "the script resumes from its own checkpoints" in text.replace("\n# ", " ")


@pytest.mark.parametrize("cpus", [None, 2, 1234567])
def test_sruns_own_words_are_whole_on_one_line_or_several(cpus: int | None) -> None:
    words = command(script(FOUR, MachineSpec(cpus=cpus)), "srun")
    own = words[1 : words.index("ftrun")]
    assert all(re.fullmatch(r"--[a-z-]+(=\S+)?", word) for word in own), own
    assert own[-1].startswith("--output=")


def test_a_run_id_of_theirs_stays() -> None:
    text = script("--run-id mine train.py")
    assert command(text) == ["ftrun", "--run-id", "mine", "train.py"]


_words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=40)


@settings(max_examples=30, deadline=None)
@given(st.lists(_words, max_size=8))
def test_the_scripts_words_are_given_as_they_were_typed(words: list[str]) -> None:
    job = job_of(["--nnodes", "2", "train.py", *words], MachineSpec(), JobOptions())
    text = batch_script(job, SlurmOptions())
    assert command(text)[3:] == ["--nnodes", "2", "train.py", *words]


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        ("train.py", {"name": "a b"}, "--name 'a b' is not usable"),
        ("train.py", {"place": SlurmOptions(partition="a;b")}, "--partition is a name"),
        ("train.py", {"place": SlurmOptions(account="")}, "--account is a name"),
        ("train.py", {"place": SlurmOptions(max_requeues=-1)}, "--max-requeues is 0 to 10000"),
        ("train.py", {"place": SlurmOptions(directives=["constraint"])}, "--sbatch is an option"),
        (
            "train.py",
            {"place": SlurmOptions(directives=["--qos=a\n#SBATCH -n 9"])},
            "--sbatch is an",
        ),
        (
            "train.py",
            {"place": SlurmOptions(directives=["--nodes=9"])},
            "is set by ftrun manifest already",
        ),
        (
            "train.py",
            {"place": SlurmOptions(directives=["-N 9"])},
            "is set by ftrun manifest already",
        ),
        ("train.py", {"time": "100s"}, "the end of the job takes 130 s"),
        ("--grace 40000 train.py", {}, "only 65535 s are available"),
    ],
)
def test_what_slurm_would_not_take_is_reported(
    words: str, options: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        script(words, **options)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_a_name_comes_from_the_script() -> None:
    assert directives(script("/a/b/my train.py".replace(" ", "_")))["job-name"] == "my_train"
    assert directives(script("-m pkg.train"))["job-name"] == "pkg"
    assert directives(script("?.py"))["job-name"] == "ftrun"


def test_it_is_queued_again_for_the_codes_that_the_pages_name() -> None:
    text = script(FOUR, place=SlurmOptions(max_requeues=7))
    assert re.search(r"^75 \| 76 \| 137 \| 138\)$", text, re.MULTILINE)
    assert "-lt 7 ]" in text
