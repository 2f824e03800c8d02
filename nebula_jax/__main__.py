"""The command `nebula`: runs what comes with the package, also where pip put it.

    nebula experiments.pretrain_m3 --flagfile=m3_quickstart.flags
    nebula scripts.plan --help
    nebula top runs/m3_quickstart                  # of a run: top, compare
    nebula switch --help                           # the commands of a federation

The first argument is a module as after `python -m`, or a command of a federation
(`scripts/nebula.py`).
"""

import os
import runpy
import sys

from nebula_jax import installed

FOLDERS = ("experiments", "scripts")
OF_RUNS = ("top", "compare")
"""Commands of `scripts` that need no folder before their name."""


def main() -> int | None:
    """Runs the module that the first argument names, as `python -m` would."""
    arguments = sys.argv[1:]
    folder = (arguments or [""])[0].partition(".")[0]
    module = "scripts.nebula"
    if folder in OF_RUNS:
        arguments[0] = f"scripts.{arguments[0]}"
        folder = "scripts"
    if folder in FOLDERS:
        module = arguments.pop(0)
        if not (installed.FOLDER / f"{module.replace('.', '/')}.py").is_file():
            known = " ".join(_commands())
            print(f"error: no command {module}; there are {known}", file=sys.stderr)
            return 2
    _search_ours_first()
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except installed.MissingExtra as error:
        print(f"error: {module}: {error}", file=sys.stderr)
        return 2
    return None


def _commands() -> list[str]:
    """Returns the modules that can be run, as `python -m` names them."""
    return [
        f"{folder}.{path.stem}"
        for folder in FOLDERS
        for path in sorted((installed.FOLDER / folder).glob("*.py"))
        if "__main__" in path.read_text("utf-8")
    ]


def _search_ours_first() -> None:
    """Lets this process, and those it starts, find our folders before the user's.

    Python would look into the working directory first, where a user may have an
    `experiments` or `scripts` of their own. It comes second, for codecs of one's own.
    """
    ours = [str(installed.FOLDER), os.getcwd()]
    sys.path[:0] = ours
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*ours, *filter(None, [inherited])])
    os.environ["PYTHONSAFEPATH"] = "1"


if __name__ == "__main__":
    sys.exit(main())
