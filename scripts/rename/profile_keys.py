"""Renames keys of profiles in text: strings, docs, YAML, FTRUN_ variables. Usage: profile_keys.py ROOT. Idempotent."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(sys.argv[1]).resolve()
KEYS = [
    line.split("\t")[1:3]
    for line in Path(".tsv").read_text().split("\n")
    if line.startswith("profile key\t") and "\tsame\t" not in line
]
SKIP = ("CHANGELOG.md", "ftrun/config/renamed_keys.py")
UNIQUE = """commit_wait_s proof_first proof_every backoff_first_s backoff_limit_s boundary_wait_s stopped_kill_s silence_report_s
suspect_s suspect_factor kill_factor phase_limit_s stop_cut_off_s pause_limit_s join_wait_s settle_s failures_per_hour warn_below""".split()
NEW = {old.split(".")[1]: new.split(".")[1] for old, new in KEYS}
BY_SECTION = {}
for old, new in KEYS:
    section, key = old.split(".")
    BY_SECTION.setdefault(section, {})[key] = new.split(".")[1]


def renamed(text, path):
    for old, new in KEYS:
        text = re.sub(rf"(?<![\w.]){re.escape(old)}\b" if not path.endswith(".py") else rf"\b{re.escape(old)}\b", new, text)
        before, after = ("FTRUN_" + one.replace(".", "_").upper() for one in (old, new))
        text = re.sub(rf"\b{before}\b", after, text)
    if path.endswith(".md"):
        text = re.sub(r"\bstream_wait_s\b", NEW["stream_wait_s"], text)
    text = re.sub(r'\("stop", "forward"\)', '("stop", "forward_signals")', text)
    text = re.sub(r"((?:\b|\\n)smp:(?:\\n)+ +)orphan_s\b", r"\1orphan_timeout_s", text)
    text = re.sub(r"\bnumbers:(?=(\\n|\s)+policy\b)", "numerics:", text)
    text = re.sub(r"\bnumbers:(?= *(#[^\n]*)?\n +policy:)", "numerics:", text)
    text = re.sub(r"\bnumbers: \{policy", "numerics: {policy", text)
    lines, section, depth = text.split("\n"), "", 0
    for at, line in enumerate(lines):
        if head := re.match(r"( *)([a-z]+): *(#.*)?$", line):
            section, depth = (head[2], len(head[1])) if head[2] in BY_SECTION else ("", 0)
        elif line.strip() and len(line) - len(line.lstrip()) <= depth:
            section = ""
        elif section and (key := re.match(r"( +)(\w+)(: *)(.*)$", line)) and key[2] in BY_SECTION[section]:
            new = BY_SECTION[section][key[2]]
            rest = re.match(r"(.*?)( +)(#.*)$", key[4])
            tail = key[4]
            if rest and len(rest[2]) > 1:
                tail = rest[1] + " " * max(1, len(rest[2]) - len(new) + len(key[2])) + rest[3]
            lines[at] = key[1] + new + key[3] + tail
    text = "\n".join(lines)
    for word in UNIQUE:
        text = re.sub(rf"\b{word}\b", NEW[word], text)
    return text


changed = 0
files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
for f in files:
    path = ROOT / f
    if not f or f in SKIP or not path.is_file() or not (f.endswith((".py", ".md", ".yaml", ".yml", ".sh")) or f.startswith("scripts/") and "." not in f.rsplit("/")[-1]):
        continue
    text = path.read_text()
    new = renamed(text, f)
    if new != text:
        path.write_text(new)
        changed += 1
print(f"profile keys: {changed} files changed")
