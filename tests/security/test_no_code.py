"""Nothing that a peer or a file holds is ever run: the source is read for it."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("nebula_jax", "experiments", "scripts")
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
KEYWORDS = {"shell", "allow_pickle"}


def offences(source):
    """What a source has that could run what it reads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found.append(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found += [name] * (name in CALLS)
            found += [
                f"{name}({each.arg}={ast.unparse(each.value)})"
                for each in node.keywords
                if each.arg in KEYWORDS and ast.unparse(each.value) != "False"
            ]
    return found


def test_no_file_of_the_project_runs_what_it_reads():
    assert not [
        f"{path.relative_to(ROOT)}: {offence}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for offence in offences(path.read_text())
    ]


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from marshal import loads", "eval(data)", "exec(data)"),
        *("os.system(data)", "yaml.load(data)", "np.load(path, allow_pickle=True)"),
        "subprocess.run(data, shell=True)",
    ],
)
def test_the_test_itself_would_find_it(source):
    assert offences(source)
