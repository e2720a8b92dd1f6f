#!/usr/bin/env bash
# bash run.sh triathlon [options]   run an experiment; options as in: bash run.sh --help
# bash run.sh test                  run the tests
# bash run.sh bench                 measure boml.py against plain versions of the same work
# bash run.sh data [--raw DIR]      prepare the datasets, downloaded or from a folder of archives
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=$here/.venv/bin/python

# The pinned packages are listed once, at the top of boml.py; installed once.
packages=$(sed -n 's|^#   "\(.*\)",$|\1|p' "$here/boml.py")
if [ "$(cat "$here/.venv/installed" 2>/dev/null)" != "$packages" ]; then
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "run.sh needs Python 3.11 or later" >&2; exit 2; }
  echo "Installing into .venv:" $packages
  python3 -m venv "$here/.venv"
  "$python" -m pip install --quiet --disable-pip-version-check $packages
  echo "$packages" > "$here/.venv/installed"
fi

case ${1:-triathlon} in
  test) exec "$python" -m pytest "$here/test_boml.py" -q "${@:2}" ;;
  bench) exec "$python" "$here/test_boml.py" ;;
  data) exec "$python" "$here/data_prep.py" "${@:2}" ;;
esac
exec "$python" "$here/boml.py" "${@:-triathlon}" --prepare
