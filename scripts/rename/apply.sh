#!/bin/bash
# apply.sh ROOT: renames the tree, then ruff. Prints lines that ruff cannot shorten.
set -e
here=$(dirname "$(readlink -f "$0")")
py=.venv/bin/python
cd "$1"
$py "$here/rename.py" .
$py "$here/profile_keys.py" .
$py -m ruff check --fix -q . >/dev/null || true
$py -m ruff format -q .
$py "$here/wrap.py" . || true
$py -m ruff format -q .
$py -m ruff check --output-format concise . || true
