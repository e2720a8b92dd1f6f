#!/usr/bin/env bash
set -euo pipefail
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
python=$here/.venv/bin/python

case ${1-} in
  triathlon | pentathlon | omniglot | run | test | classify | report | data | bench | approximation) ;;
  *)
    cat <<'TXT'
bash run.sh triathlon      Omniglot, miniQuickDraw, CIFAR-FS: the main experiment; also pentathlon,
                           omniglot, or run --sequence A,B,...; options: bash run.sh triathlon --help
bash run.sh test           run the tests
bash run.sh classify       put what a run has learned to use on your own images
bash run.sh report         tables, verdicts and figures of all runs, from their records
bash run.sh data           prepare the datasets; --raw DIR takes archives from a folder
bash run.sh bench          measure boml.py against plain versions of the same work
bash run.sh approximation  measure BomLA's curvature against the exact one
TXT
    case ${1-help} in help | -h | --help) exit 0 ;; esac
    echo "run.sh: '$1' is none of these." >&2
    exit 2 ;;
esac

# The pinned packages are listed once, at the top of boml.py, and installed once: where flock is,
# a second call waits.
exec 9< "$here"
flock 9 || true
packages=$(sed -n 's|^#   "\(.*\)",$|\1|p' "$here/boml.py")
if [ "$(cat "$here/.venv/installed" 2>/dev/null)" != "$packages" ] || ! "$python" -c '' 2>/dev/null; then
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "run.sh needs Python 3.11 or later" >&2; exit 2; }
  echo "Installing into .venv:" $packages
  python3 -m venv --clear "$here/.venv"
  "$python" -m pip install --quiet --disable-pip-version-check $packages
  echo "$packages" > "$here/.venv/installed"
fi
exec 9<&-

case $1 in
  test) exec "$python" -m pytest "$here/test_boml.py" -q "${@:2}" ;;
  bench | approximation) exec "$python" "$here/test_boml.py" "$@" ;;
  data) exec "$python" "$here/data_prep.py" "${@:2}" ;;
  report | classify) exec "$python" "$here/data_prep.py" "$@" ;;
esac
exec "$python" "$here/data_prep.py" launch "$@"
